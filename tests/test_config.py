import pytest

from gact_fx import Config
from gact_fx.config import MODES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_bits": 0.5}, r"budget_bits must lie in \[1, 16\], .* got 0.5"),
        ({"budget_bits": 17}, r"budget_bits must lie in \[1, 16\]"),
        ({"budget_bits": float("nan")}, r"budget_bits must lie in \[1, 16\]"),
        ({"budget_bits": "4"}, "budget_bits must lie in .* got '4'"),
        ({"budget_bits": 3.5, "adaptive": False}, "adaptive=False takes a whole number of bits"),
        ({"group_size": 100}, "group_size must be None or one of .* got 100"),
        ({"inner": "tvm"}, "inner must be one of .* got 'tvm'"),
        ({"rounding": "up"}, "rounding must be one of .* got 'up'"),
        ({"fuse": True}, "fuse must be one of .* got True"),
        ({"fuse": "on", "inner": "eager"}, "fuse='on' needs inner='inductor', .* got inner='eager'"),
        ({"recompute": "on"}, "recompute must be one of .* got 'on'"),
        ({"sensitivity": "exact"}, "sensitivity must be one of .* got 'exact'"),
        ({"budget_bytes": 0}, "budget_bytes must be a positive whole number, or None, got 0"),
        ({"budget_bytes": 1e6}, "budget_bytes must be a positive whole number"),
        ({"max_gradient_noise": 0}, "max_gradient_noise must be a positive number, or None, got 0"),
        ({"max_gradient_noise": float("nan")}, "max_gradient_noise must be a positive number"),
        ({"budget_bytes": 10, "max_gradient_noise": 0.1}, "give budget_bytes or max_gradient_noise, not both"),
        ({"budget_bytes": 10, "adaptive": False}, "budget_bytes cannot be kept with adaptive=False"),
        ({"max_gradient_noise": 0.1, "budget_bits": None}, "max_gradient_noise cannot be kept with budget_bits=None"),
        ({"profile_every": 0}, "profile_every must be a positive whole number of steps, or None, got 0"),
        ({"profile_draws": 0}, "profile_draws must be a whole number"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"dynamic": "yes"}, r"dynamic must be one of \(None, False, True\), got 'yes'"),
        ({"dynamic": 1}, r"dynamic must be one of \(None, False, True\), got 1"),
        ({"swap": "L3"}, r"swap must be one of \(False, True\), got 'L3'"),
        ({"swap": True, "mode": "reduce-overhead"}, "CUDA graphs cannot, got mode='reduce-overhead'"),
        ({"swap": True, "budget_bits": None}, "swap=True moves codes, and budget_bits=None makes none"),
        ({"fullgraph": None}, r"fullgraph must be one of \(False, True\), got None"),
        ({"mode": "fast"}, "mode must be None or one of .*'max-autotune'.*, got 'fast'"),
        ({"mode": "max-autotune", "inner": "eager"}, "mode is for inner='inductor', got inner='eager'"),
        ({"inductor_options": {}, "inner": "eager"}, "inductor_options is for inner='inductor'"),
        ({"inductor_options": 3}, "inductor_options must map options to values, got 3"),
        ({"inductor_options": {"max_autotun": True}}, "unknown option 'max_autotun' in inductor_options"),
        ({"inductor_options": {"custom_partitioner_fn": None}}, "unknown option 'custom_partitioner_fn'"),
        ({"bits": 4}, "unknown option 'bits'; the options are adaptive, budget_bits"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Config.from_options(options)
    assert "\n" not in str(caught.value)


def test_options_lie_over_a_base() -> None:
    config = Config.from_options({"seed": 7}, Config(budget_bits=2))
    assert (config.budget_bits, config.seed) == (2, 7)


def test_levels() -> None:
    assert Config.from_level("L0").budget_bits is None
    assert Config.from_level("L1") == Config(budget_bits=4, adaptive=False)
    assert Config.from_level("L2.2", seed=3) == Config(budget_bits=2, seed=3)
    assert Config.from_level("L3") == Config(budget_bits=4, swap=True)
    assert Config.from_level("swap") == Config(budget_bits=8, adaptive=False, swap=True)


def test_levels_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"level must be one of .*'L3', 'swap'.*, got 'L9'"):
        Config.from_level("L9")


def test_a_mode_stands_for_options_of_inductor() -> None:
    """The names are those of torch.compile, which may get others."""
    from torch._inductor import list_mode_options

    assert set(MODES) <= set(list_mode_options())
    config = Config(mode="max-autotune", inductor_options={"epilogue_fusion": False, "max_autotune": False})
    assert config.inductor_patches == {
        **list_mode_options("max-autotune"),
        "epilogue_fusion": False,
        "max_autotune": False,
    }
    assert Config().inductor_patches == {} and hash(config) == hash(Config(mode="max-autotune"))
