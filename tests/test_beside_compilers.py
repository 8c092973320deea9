"""torch.compile around a compiled model, ``.compile()`` after it, and torch.export: nothing is lost without a word."""

import copy
import functools
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from activation_bytes import activation_bytes
from conftest import gradients, relative_error
from torch import nn

import gact_fx
from gact_fx.graphs import dynamo

X = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x))).square().mean()


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x) * 2
        return result


def held(call: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, steps: int = 3) -> int:
    """Bytes that the last of some training steps holds for backward."""
    nbytes = 0
    for _ in range(steps):
        model.zero_grad()
        loss = call(X)
        nbytes = activation_bytes(loss, exclude=[*model.parameters(), X])
        loss.backward()
    return nbytes


def compiled_again(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


AROUND: dict[str, Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]] = {
    "torch.compile": lambda model: torch.compile(model, backend="aot_eager"),
    "its method": compiled_again,
    "a function": lambda model: torch.compile(lambda x: model(x) * 2, backend="aot_eager"),
    "a module": lambda model: torch.compile(Outer(model), backend="aot_eager"),
}


@pytest.mark.parametrize("trained", [False, True], ids=["untrained", "trained"])
@pytest.mark.parametrize("around", AROUND)
def test_another_compiler_compiles_around_the_model(around: str, trained: bool) -> None:
    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())
    gact_fx.compile(model, inner="eager", budget_bits=8)
    if trained:
        held(model, model)
    nbytes = held(AROUND[around](model), model)
    loss = reference(X) * (1 if around in ("torch.compile", "its method") else 2)
    assert nbytes < 0.4 * activation_bytes(loss, exclude=[*reference.parameters(), X])
    loss.backward()
    assert 1e-5 < relative_error(gradients(model), gradients(reference)) < 0.02


def test_compiling_twice_is_said_to_do_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = gact_fx.compile(Net(), inner="eager")
    with caplog.at_level(logging.WARNING, "gact_fx"):
        model.compile()
    assert "Net.compile() does nothing: gact_fx.compile has compiled this model" in caplog.text


class Own(Net):
    """A class with a call and a ``compile`` of its own."""

    optimizer = ""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().__call__(x) * 3
        return result

    def compile(self, optimizer: str) -> None:
        self.optimizer = optimizer


def test_what_a_class_defines_itself_stays() -> None:
    model = gact_fx.compile(Own(), inner="eager")
    model(X).backward()
    model.compile("adam")
    assert model.optimizer == "adam"
    around = torch.compile(model, backend="aot_eager")
    assert float(around(X)) == pytest.approx(float(model(X)), rel=1e-4)
    assert held(around, model) == pytest.approx(held(model, model), rel=0.01)


@pytest.mark.parametrize("way", ["function", "method"])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deep", "pickle"]
)
def test_copies_can_be_compiled_by_others(copied: Callable[[nn.Module], nn.Module], way: str) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    model = gact_fx.compile(Net(), inner="eager")
    model(X).backward()
    other = copied(model)
    if way == "method":
        other.compile(backend=backend)
    call = torch.compile(other, backend=backend) if way == "function" else other
    assert float(call(X)) == pytest.approx(float(model(X)), rel=1e-4)
    assert graphs


def test_a_failed_compilation_leaves_the_calls_of_other_compilers() -> None:
    model = Net()
    with pytest.raises(ValueError, match="sample batch 0 failed"):
        gact_fx.compile(model, inner="eager", sample_batches=[(X[:, :3],)])
    assert not {"__call__", "compile"} & model.__dict__.keys()


@pytest.mark.parametrize("strict", [False, True])
def test_export_sees_the_model_itself(strict: bool) -> None:
    model = gact_fx.compile(Net(), inner="eager")
    for _ in range(2):
        model(X).backward()
    exported = torch.export.export(model.eval(), (X,), strict=strict)
    assert not any("gact_fx" in str(node.target) for node in exported.graph.nodes)
    assert float(exported.module()(X)) == pytest.approx(float(model(X)), rel=1e-4)


def test_inspection_looks_into_wrappers() -> None:
    model = gact_fx.compile(Net(), inner="eager")
    held(model, model)
    report = gact_fx.inspect(model)
    assert report.rows and not report.note
    for wrapper in (torch.compile(model, backend="aot_eager"), Outer(model), nn.Sequential(Outer(model))):
        found = gact_fx.inspect(wrapper)
        assert found.rows == report.rows and not found.note
    assert "this copy of a compiled model is not compiled" in gact_fx.inspect(copy.deepcopy(model)).note
    several = nn.Sequential(model, gact_fx.compile(Net(), inner="eager"))
    with pytest.raises(ValueError, match=r"2 modules of this Sequential were compiled.*one by one \(0, 1\)"):
        gact_fx.inspect(several)
    with pytest.raises(ValueError, match="was not compiled"):
        gact_fx.inspect(Outer(Net()))


def test_a_part_that_was_compiled_is_named() -> None:
    model = Outer(nn.Sequential(nn.Linear(64, 64), Net()))
    part = "inner.1"
    gact_fx.compile(model.get_submodule(part), inner="eager")
    told = f"this covers {part}, which was compiled; other modules of this Outer are not compressed"
    assert gact_fx.inspect(model).note.startswith(f"{told}; no plan yet")
    held(model, model)
    assert gact_fx.inspect(model).note == told
    assert told in str(gact_fx.inspect(model)) and not gact_fx.inspect(model.get_submodule(part)).note
    # Around it there may be parameters as well.
    around = Outer(model.get_submodule(part))
    assert not gact_fx.inspect(around).note
    around.scale = nn.Parameter(torch.ones(()))
    assert "this covers inner, which was compiled" in gact_fx.inspect(around).note


@pytest.mark.parametrize("compiled", [Net(), lambda x: x.square().sum()], ids=["module", "function"])
def test_a_model_that_was_never_called(compiled: Any) -> None:
    model = gact_fx.compile(compiled, inner="eager", min_elements=64)
    if isinstance(model, nn.Module):
        for _ in range(2):
            model.forward(X).backward()
    report = gact_fx.inspect(model)
    assert "the compiled model was never called" in report.note and report.note in str(report)
    assert "by model(...): a direct call of model.forward(...) runs uncompressed" in report.note
    with torch.no_grad():
        model(X)
    assert "never called" not in gact_fx.inspect(model).note
    if isinstance(model, nn.Module):
        model(X).backward()
        model.forward(X).backward()
        assert "no graph compiled with it yet; run a training step, by model(...)" in gact_fx.inspect(model).note


def test_what_is_said_once_leaves_dynamos_metrics_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 writes its configuration down as JSON, and prints a traceback for a set of functions."""

    @functools.lru_cache
    def say(text: str) -> None:
        raise AssertionError("a graph that is compiled does not say it")

    class Talking(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            say("once")
            return super().forward(x)

    monkeypatch.setattr(dynamo, "_said_once", lambda: {say})
    records: list[logging.LogRecord] = []
    logger, handler = logging.getLogger("torch._dynamo.metrics_context"), logging.Handler(logging.ERROR)
    monkeypatch.setattr(handler, "emit", records.append)
    logger.addHandler(handler)
    model = Talking()
    gact_fx.compile(model, budget_bits=8, inner="eager", min_elements=64, fullgraph=True)
    for _ in range(3):
        model(X).sum().backward()
    logger.removeHandler(handler)
    assert not records
