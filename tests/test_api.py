import inspect
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from conftest import Mixed, gradients, mixed_batch, relative_error
from torch import nn

import gact_fx
from gact_fx.options import UNSET
from gact_fx.training.model import session_of

# What was planned for a budget of bytes.
PLAN = gact_fx.Plan(None, "", ())
INNER = pytest.mark.parametrize("inner", ["inductor", "eager"])


@INNER
def test_no_budget_gives_the_gradients_of_torch_compile(inner: str) -> None:
    model = Mixed()
    twin = Mixed()
    twin.load_state_dict(model.state_dict())
    gact_fx.compile(model, budget_bits=None, inner=inner)
    twin.compile(backend="inductor" if inner == "inductor" else "aot_eager")
    for _ in range(2):
        model(*mixed_batch()).backward()
        twin(*mixed_batch()).backward()
        for a, b in zip(gradients(model), gradients(twin), strict=True):
            assert torch.equal(a, b)
    assert "compression is off" in str(gact_fx.inspect(model))


@pytest.mark.both_compilers
@INNER
@pytest.mark.parametrize("sampled", [True, False])
def test_profile_plan_train(inner: str, sampled: bool) -> None:
    model, reference = Mixed(), Mixed()
    reference.load_state_dict(model.state_dict())
    batch = mixed_batch()
    assert gact_fx.compile(model, budget_bits=8, inner=inner, sample_batches=[batch] if sampled else None) is model
    steps = 1 if sampled else 2
    for _step in range(steps):
        assert not gact_fx.inspect(model).graphs
        model(*batch).backward()
        reference(*batch).backward()
        found, exact = gradients(model), gradients(reference)
        # The sample runs at 8 bits, too.
        assert 1e-5 < relative_error(found, exact) < 0.02
    report = gact_fx.inspect(model)
    assert report.ratio > 3
    for buffer, wanted in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(buffer, wanted, rtol=1e-4, atol=1e-5)


def test_profiling_leaves_no_trace() -> None:
    model = Mixed(dropout=0.1)
    model(*mixed_batch()).backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    noise = torch.get_rng_state()
    gact_fx.compile(model, inner="eager", sample_batches=[mixed_batch()] * 2)
    assert torch.equal(noise, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    for p, wanted in zip(model.parameters(), grads, strict=True):
        assert (p.grad is None) == (wanted is None) and (wanted is None or torch.equal(p.grad, wanted))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_batches": []}, "sample_batches is empty"),
        ({"sample_batches": torch.zeros(3)}, "sample_batches must be an iterable of batches, got one Tensor"),
        ({"sample_batches": [(torch.zeros(2, 5),)]}, "sample batch 0 failed with TypeError"),
        ({"sample_batches": [(torch.zeros(2, 5), torch.zeros(2).long())]}, "sample batch 0 failed with"),
        (
            {"sample_batches": [mixed_batch()], "loss_fn": lambda m, b: m.conv(b[0])},
            "must return a scalar tensor, got a tensor of",
        ),
        ({"sample_batches": [mixed_batch()], "loss_fn": lambda m, b: 3.0}, "must return a scalar tensor, got float"),
        ({"sample_batches": [mixed_batch()], "loss_fn": lambda m, b: m(*b).detach()}, "the loss has no gradient"),
        ({"budget_bits": 0}, r"budget_bits must lie in \[1, 16\]"),
        ({"budget": 4}, r"unknown option 'budget'; did you mean 'budget_bits'\?"),
        ({"sample_batch": []}, r"unknown option 'sample_batch'; did you mean 'sample_batches'\?"),
        ({"bits": 4}, "unknown option 'bits'; the options are adaptive, .*, sample_batches, "),
        ({"loss_fn": lambda m, b: m(*b)}, "loss_fn is for sample_batches, got none; pass these too"),
        ({"budget_bits": 4, "budget_bytes": "8GB"}, "budget_bits=4 and budget_bytes='8GB'; leave one out"),
        ({"budget_bits": 4, "config": gact_fx.Config(budget_bits=8)}, "budget_bits=4 is given beside config=Config"),
        ({"budget_bits": 3, "config": "L2"}, "budget_bits=3 is given beside config='L2', which says budget_bits=4"),
        ({"plan": PLAN, "sample_batches": [mixed_batch()]}, "sample_batches do nothing beside plan="),
        ({"plan": PLAN, "budget_bits": 4}, "budget_bits=4 does nothing beside plan="),
        ({"plan": PLAN, "budget_bits": None}, "budget_bits=None turns compression off, and plan= would do nothing"),
        ({"adaptive": "no"}, r"adaptive must be one of \(False, True\), got 'no'"),
    ],
)
def test_bad_input_is_one_line_and_leaves_the_model_alone(options: dict[str, object], message: str) -> None:
    model = Mixed()
    with pytest.raises(ValueError, match=message) as caught:
        gact_fx.compile(model, inner="eager", **options)  # type: ignore[arg-type]
    assert str(caught.value).startswith("gact_fx.compile: ") and "\n" not in str(caught.value)
    model(*mixed_batch()).backward()
    with pytest.raises(ValueError, match=r"was not compiled by gact_fx\.compile"):
        gact_fx.inspect(model)


@pytest.mark.slow
def test_many_models_in_one_process() -> None:
    """Dynamo stops compiling after 8 recompilations of one code object, with a warning nobody reads."""
    for _ in range(10):
        model = Mixed()
        gact_fx.compile(model, inner="eager", adaptive=False, sample_batches=[mixed_batch()])
        model(*mixed_batch()).backward()
        assert gact_fx.inspect(model).ratio > 2


def test_a_sample_step_without_finite_gradients_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    model = gact_fx.compile(Mixed(), inner="eager")
    with caplog.at_level(logging.WARNING, "gact_fx"):
        (model(*mixed_batch()) * float("inf")).backward()
    assert "sampling another one" in caplog.text and gact_fx.inspect(model).plan is None
    for _ in range(2):
        model(*mixed_batch()).backward()
    assert gact_fx.inspect(model).ratio > 2
    with pytest.raises(
        ValueError, match="no sample batch has finite gradients, and the last one has none in eager PyTorch"
    ):
        gact_fx.compile(
            Mixed(), inner="eager", sample_batches=[mixed_batch()], loss_fn=lambda m, b: m(*b) * float("nan")
        )


def test_profiling_a_function_leaves_its_module_alone() -> None:
    module = Mixed()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    gact_fx.compile(lambda x, y: module(x, y), inner="eager", sample_batches=[mixed_batch()])
    assert all(p.grad is None for p in module.parameters())
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def test_the_options_of_compile_are_those_of_config() -> None:
    """No default is stated twice."""
    parameters = inspect.signature(gact_fx.compile).parameters
    unset = {name for name, parameter in parameters.items() if parameter.default is UNSET}
    assert unset == {field.name for field in fields(gact_fx.Config)}
    assert set(parameters) - unset == {"model", "sample_batches", "loss_fn", "config", "plan", "unknown"}
    types, wanted = get_type_hints(gact_fx.compile), get_type_hints(gact_fx.Config)
    # In a session a schedule is a number, of which alone mypy is to know.
    wanted["budget_bits"] = float | Mapping[int, float] | Callable[[int], float] | None
    assert {name: types[name] for name in unset} == wanted


def test_a_plan_by_its_path_and_a_config_by_its_level(tmp_path: Path) -> None:
    model = gact_fx.compile(Mixed(), config="L2.1", inner="eager", sample_batches=[mixed_batch()])
    plan = gact_fx.inspect(model).plan
    assert plan is not None and plan.budget_bits == 3
    plan.save(tmp_path / "plan.json")
    for path in (tmp_path / "plan.json", str(tmp_path / "plan.json")):
        assert gact_fx.inspect(gact_fx.compile(Mixed(), inner="eager", plan=path)).plan == plan
    # Given explicitly, the default seed counts as well.
    other = gact_fx.compile(Mixed(), inner="eager", plan=plan.reseeded(7), seed=0)
    assert gact_fx.inspect(other).plan == plan.reseeded(0)


def test_all_errors_have_one_base_class(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    model = gact_fx.compile(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), inner="eager")
    x = torch.randn(64, 64, requires_grad=True)
    once = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0]
    calls: list[tuple[type[Exception], Callable[[], object]]] = [
        (TypeError, lambda: gact_fx.compile(3)),  # type: ignore[type-var]
        (ValueError, lambda: gact_fx.compile(Mixed(), seed=-1)),
        (ValueError, lambda: gact_fx.inspect(Mixed())),
        (ValueError, lambda: gact_fx.measure_gradient_error(Mixed(), [mixed_batch()])),
        (ValueError, lambda: gact_fx.Plan.load(tmp_path / "plan.json")),
        (ValueError, lambda: gact_fx.Config.from_level("L9")),
        (RuntimeError, lambda: once.sum().backward()),
    ]
    for kind, call in calls:
        with pytest.raises(gact_fx.GactError) as caught:
            call()
        assert isinstance(caught.value, kind)


def test_an_explicit_budget_overrides_the_config() -> None:
    config = gact_fx.Config(inner="eager")
    model = gact_fx.compile(Mixed(), budget_bits=2, config=config, sample_batches=[mixed_batch()])
    plan = gact_fx.inspect(model).plan
    assert plan is not None and plan.budget_bits == 2


def test_what_is_not_a_model() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module or a function, got int"):
        gact_fx.compile(3)  # type: ignore[type-var]


def test_a_loss_of_the_wrong_kind_from_the_model() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="must return a scalar tensor"):
        gact_fx.compile(model, inner="eager", sample_batches=[torch.randn(2, 4)])


@INNER
def test_a_bare_container_of_torch_is_compiled_too(inner: str) -> None:
    """nn.Module.compile on an nn.Sequential compiles nothing at all, silently."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    gact_fx.compile(model, inner=inner)
    for _ in range(2):
        model(torch.randn(64, 16)).sum().backward()
    assert gact_fx.inspect(model).ratio > 2


def test_a_plain_function() -> None:
    weight = nn.Parameter(torch.randn(32, 32))

    def loss(x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return (x @ weight).tanh().square().sum()

    compiled = gact_fx.compile(loss, inner="eager", sample_batches=[torch.randn(64, 32)])
    compiled(torch.randn(64, 32)).backward()
    assert gact_fx.inspect(compiled).ratio > 2
    assert compiled.__doc__ == "The loss."


def test_nothing_to_compress_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    with caplog.at_level(logging.WARNING, "gact_fx"):
        gact_fx.compile(model, inner="eager", sample_batches=[torch.randn(2, 4)], loss_fn=lambda m, b: m(b).sum())
    model(torch.randn(2, 4)).sum().backward()
    assert "nothing to compress" in caplog.text
    assert "nothing to compress" in str(gact_fx.inspect(model))


@INNER
def test_eval_and_no_grad_are_not_touched(inner: str) -> None:
    model, reference = Mixed(), Mixed()
    reference.load_state_dict(model.state_dict())
    gact_fx.compile(model, inner=inner, sample_batches=[mixed_batch()])
    model.eval(), reference.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(*mixed_batch()), reference(*mixed_batch()), rtol=1e-4, atol=1e-5)


def test_a_graph_whose_output_the_loss_ignores_does_not_stop_planning() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 64), nn.Linear(32, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            unused = self.a(x).tanh()
            torch._dynamo.graph_break()
            return unused, self.b(x).tanh() * 2

    model = gact_fx.compile(Two(), inner="eager")
    for _ in range(3):
        model(torch.randn(64, 32))[1].square().sum().backward()
    assert any(row.encoding == "quantize" for row in gact_fx.inspect(model).rows)


@INNER
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_activations_give_the_gradients_of_autograd(inner: str, value: float) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    gact_fx.compile(
        model, inner=inner, budget_bits=8, sample_batches=[torch.randn(64, 16)], loss_fn=lambda m, b: m(b).sum()
    )
    reference = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    reference.load_state_dict(model.state_dict())
    x = torch.randn(64, 16)
    x[3, 5] = value
    model(x).sum().backward(), reference(x).sum().backward()
    for a, b in zip(gradients(model), gradients(reference), strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())
        # inf and NaN may stand for each other: 1 - tanh(inf)^2 is 0 exactly, and only nearly so from codes.
        torch.testing.assert_close(a[a.isfinite()], b[b.isfinite()], rtol=0.1, atol=0.5)


def test_a_compilation_that_fails_leaves_the_one_before() -> None:
    torch.manual_seed(0)
    model = gact_fx.compile(Mixed(), inner="eager", sample_batches=[mixed_batch()])
    plan = gact_fx.inspect(model).plan
    with pytest.raises(ValueError, match="sample_batches is empty"):
        gact_fx.compile(model, inner="eager", sample_batches=[])
    model(*mixed_batch()).backward()
    report = gact_fx.inspect(model)
    assert report.plan is plan and report.bytes_after > 0


@pytest.mark.slow
def test_backend_by_name_needs_no_import() -> None:
    program = """
import torch, logging
logging.basicConfig(level=logging.INFO)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
exact = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
exact.load_state_dict(model.state_dict())
compiled = torch.compile(model, backend="gact", options={"budget_bits": 8, "inner": "eager"})
x = torch.randn(64, 16)
errors = []
for _ in range(3):
    model.zero_grad(), exact.zero_grad()
    compiled(x).square().sum().backward(), exact(x).square().sum().backward()
    g, e = model[0].weight.grad, exact[0].weight.grad
    errors.append(float((g - e).norm() / e.norm()))
assert 1e-5 < errors[0] < 0.02, errors   # the sample runs at 8 bits
assert 1e-5 < errors[1] < 0.05, errors   # the plan
compiled.eval()
with torch.no_grad():
    assert torch.allclose(compiled(x), exact(x), atol=1e-5)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "planned" in done.stderr


def test_backend_by_name_names_bad_options() -> None:
    with warnings.catch_warnings(), pytest.raises(Exception, match="unknown option 'bits'"):
        torch.compile(lambda x: x.sin(), backend="gact", options={"bits": 4})(torch.randn(3, requires_grad=True))


def test_backend_by_name_profiles_again_and_goes_on() -> None:
    """What it compiled for either kind of step lives on while the other kind runs."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
    compiled = torch.compile(model, backend="gact", options={"inner": "eager", "profile_every": 3})
    for _ in range(10):
        compiled(torch.randn(64, 16)).square().sum().backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model))


def test_profiling_is_silent_when_not_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    gact_fx.compile(Mixed(), inner="eager", sample_batches=[mixed_batch()])
    captured = capfd.readouterr()
    assert captured.out == "" and "profiling" not in captured.err


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (False, 2)])
def test_dynamic_sizes_as_in_torch_compile(dynamic: bool, graphs: int) -> None:
    model = gact_fx.compile(nn.Sequential(nn.Linear(16, 64), nn.Tanh()), inner="eager", dynamic=dynamic)
    for rows in (40, 40, 56):
        model(torch.randn(rows, 16)).sum().backward()
    session = session_of(model)
    assert session is not None and len(session.graphs) == graphs


def test_fullgraph_as_in_torch_compile() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        x = x.tanh()
        torch._dynamo.graph_break()
        return x.sin().sum()

    x = torch.randn(64, 64, requires_grad=True)
    gact_fx.compile(loss, inner="eager")(x).backward()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        gact_fx.compile(loss, inner="eager", fullgraph=True)(x)


@pytest.mark.slow
@pytest.mark.parametrize("budget_bits", [None, 4])
def test_options_reach_inductor(budget_bits: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where compression is off, too."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    seen = []
    lower = GraphLowering.run

    def watched(*args: Any, **kwargs: Any) -> object:
        seen.append((config.max_fusion_size, config.epilogue_fusion, config.allow_buffer_reuse))
        return lower(*args, **kwargs)

    monkeypatch.setattr(GraphLowering, "run", watched)
    layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh())
    options = {"max_fusion_size": 7, "epilogue_fusion": False}
    model = gact_fx.compile(layers, budget_bits=budget_bits, inductor_options=options)
    with config.patch(force_disable_caches=True):
        for _ in range(2):
            model(torch.randn(64, 16)).sum().backward()
    # What gact_fx compiles frees its buffers, which Inductor would keep until it needs one of their size.
    assert seen and set(seen) == {(7, False, budget_bits is None)}


def test_backend_by_name_takes_a_mode_and_names_what_is_not_its_own() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    compiled = torch.compile(lambda x: x.tanh().square().sum(), backend="gact", mode="reduce-overhead")
    for _ in range(2):
        compiled(x).backward()
    for name in ("dynamic", "fullgraph"):
        with pytest.raises(Exception, match=f"beside backend='gact', give {name} to torch.compile itself"):
            torch.compile(lambda x: x.sin(), backend="gact", options={name: True})(x)
