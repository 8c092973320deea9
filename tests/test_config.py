from dataclasses import replace

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
        ({"budget_bytes": 0}, 'budget_bytes must be a positive whole number, a text as "8GB", .*, or None, got 0'),
        ({"budget_bytes": "8"}, "budget_bytes must be a positive whole number, a text .* got '8'"),
        ({"budget_bytes": "0MB"}, "budget_bytes must be .* got '0MB'"),
        ({"budget_bytes": "8 apples"}, "budget_bytes must be .* got '8 apples'"),
        ({"budget_bytes": "0%"}, "budget_bytes must be .* got '0%'"),
        ({"budget_bytes": "101%"}, "budget_bytes must be .* got '101%'"),
        ({"budget_bytes": "60 %", "adaptive": False}, "budget_bytes cannot be kept with adaptive=False"),
        ({"budget_bits": 4, "budget_bytes": 10}, "not both: got budget_bits=4 and budget_bytes=10; leave one out"),
        ({"budget_bit": 4}, r"unknown option 'budget_bit'; did you mean 'budget_bits'\?"),
        ({"budget_bytes": 1e6}, "budget_bytes must be a positive whole number"),
        ({"max_gradient_noise": 0}, "max_gradient_noise must be a positive number, or None, got 0"),
        ({"max_gradient_noise": float("nan")}, "max_gradient_noise must be a positive number"),
        ({"budget_bytes": 10, "max_gradient_noise": 0.1}, "give budget_bytes or max_gradient_noise, not both: got"),
        ({"budget_bits": 3, "max_gradient_noise": 0.1, "budget_bytes": 1}, "max_gradient_noise, not all: got budget_b"),
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
    assert Config.from_options({"seed": 7}, "L2.1") == Config(budget_bits=3, seed=7)
    # What the base leaves at its default it does not say.
    assert Config.from_options({"budget_bits": 2}, Config(seed=7)) == Config(budget_bits=2, seed=7)
    assert Config.from_options({"budget_bytes": "1kB"}, Config(budget_bytes=1000)) == Config(budget_bytes=1000)


@pytest.mark.parametrize(
    ("options", "base", "message"),
    [
        (
            {"budget_bits": 4},
            Config(budget_bits=8),
            "budget_bits=4 is given beside config=Config, .* budget_bits=8",
        ),
        ({"budget_bits": 3}, "L2", "budget_bits=3 is given beside config='L2', which says budget_bits=4; leave one"),
        ({"swap": False}, "L3", "swap=False is given beside config='L3', which says swap=True"),
        ({"budget_bits": 4}, Config(budget_bytes=10), "give budget_bits or budget_bytes, not both"),
        ({"budget_bytes": 10}, Config(budget_bits=8), "give budget_bits or budget_bytes, not both"),
        ({"budget_bytes": 10}, "L2", "give budget_bits or budget_bytes, not both: got budget_bits=4"),
        ({"seed": 1}, "L9", "level must be one of .*, got 'L9'"),
    ],
)
def test_options_that_contradict_their_base(options: dict[str, object], base: Config | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config.from_options(options, base)


@pytest.mark.parametrize(
    ("text", "budget"),
    [("8GB", 8 * 10**9), ("500MB", 5 * 10**8), ("2GiB", 2**31), ("1.5 kib", 1536), ("64B", 64), ("60%", "60%"),
     (" 12.50 % ", "12.5%"), ("100%", "100%")],
)  # fmt: skip
def test_budgets_of_bytes_as_texts(text: str, budget: int | str) -> None:
    config = Config(budget_bytes=text)
    assert config.budget_bytes == budget and replace(config, seed=1).budget_bytes == budget


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
