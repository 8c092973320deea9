from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Mixed, gradients, mixed_batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gact_fx
from gact_fx.training.model import session_of


class Broken(nn.Module):
    """Two graphs, and what eager PyTorch saves between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return torch.tanh(self.second(x)).square().sum()


def train(model: Callable[..., torch.Tensor], *batch: torch.Tensor, steps: int = 2) -> None:
    for _ in range(steps):
        model(*batch).backward()


MODELS = pytest.mark.parametrize(
    ("build", "batch"), [(Mixed, mixed_batch(64)), (Broken, (torch.randn(64, 64),))], ids=["whole", "broken"]
)
INNER = pytest.mark.parametrize("inner", ["inductor", "eager"])


@INNER
@MODELS
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_model_is_as_it_was(
    inner: str, build: Callable[[], nn.Module], batch: tuple[torch.Tensor, ...], steps: int
) -> None:
    model = build()
    calls: list[int] = []
    model.register_forward_pre_hook(lambda module, args: calls.append(len(args)))
    before, kind = dict(vars(model)), type(model)
    gact_fx.compile(model, inner=inner)
    train(model, *batch, steps=steps)
    assert gact_fx.uncompile(model) is model
    assert vars(model) == before and type(model) is kind and model.forward.__func__ is kind.forward  # type: ignore[attr-defined]
    # Buffers have gone on, gradients were added to.
    model.zero_grad()
    reference = build()
    reference.load_state_dict(model.state_dict())
    calls.clear()
    for each in (model, reference):
        train(each, *batch)
    assert calls == [len(batch)] * 2
    for found, exact in zip(gradients(model), gradients(reference), strict=True):
        assert torch.equal(found, exact)
    with pytest.raises(ValueError, match="was not compiled"):
        gact_fx.inspect(model)


@INNER
@MODELS
def test_plan_and_graphs_are_freed(inner: str, build: Callable[[], nn.Module], batch: tuple[torch.Tensor, ...]) -> None:
    model = gact_fx.compile(build(), inner=inner, min_elements=64)
    train(model, *batch)
    session = session_of(model)
    assert session is not None and session.plan is not None and session.graphs
    graphs = [graph.pair.forward for graph in session.graphs] + [graph.replayable.backward for graph in session.graphs]
    found = [weakref.ref(each) for each in (session, session.plan, session.lifecycle, *session.graphs, *graphs)]
    del session, graphs
    gact_fx.uncompile(model)
    gc.collect()
    assert [each() for each in found] == [None] * len(found)


def test_graphs_of_an_older_plan_are_freed() -> None:
    model = gact_fx.compile(Mixed(), inner="eager", sample_batches=[mixed_batch()])
    train(model, *mixed_batch())
    session = session_of(model)
    assert session is not None and session.plan is not None
    older = weakref.ref(session.graphs[0].pair.forward)
    session.adopt(session.plan.reseeded(3))
    train(model, *mixed_batch())
    gc.collect()
    assert older() is None and session.graphs[0].pair.forward is not None


@pytest.mark.slow
def test_a_model_compiled_twice_or_over_torch_compile() -> None:
    model, batch = Mixed(), mixed_batch()
    model.compile(backend="aot_eager")
    theirs = model._compiled_call_impl
    for _ in range(2):
        gact_fx.compile(model, inner="eager", sample_batches=[batch])
    train(model, *batch)
    gact_fx.uncompile(model)
    assert model._compiled_call_impl is theirs
    train(model, *batch)
    # And back again.
    gact_fx.compile(model, inner="eager", sample_batches=[batch])
    train(model, *batch)
    assert gact_fx.inspect(model).ratio > 2


@pytest.mark.parametrize(
    "duplicate",
    [pytest.param(copy.deepcopy, marks=pytest.mark.slow), lambda model: pickle.loads(pickle.dumps(model))],
)
def test_copies_and_their_original_do_not_touch_each_other(duplicate: Callable[[Any], Any]) -> None:
    model = gact_fx.compile(Mixed(), inner="eager", sample_batches=[mixed_batch()])
    train(model, *mixed_batch())
    first, second = duplicate(model), duplicate(model)
    gact_fx.uncompile(first)
    assert vars(first).keys() == vars(Mixed()).keys()
    train(first, *mixed_batch())
    assert gact_fx.inspect(model).ratio > 2
    gact_fx.uncompile(model)
    assert gact_fx.inspect(second).plan is not None
    train(second, *mixed_batch())


def test_a_function() -> None:
    weight = nn.Parameter(torch.randn(32, 32))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).tanh().square().sum()

    compiled = gact_fx.compile(loss, inner="eager", sample_batches=[torch.randn(64, 32)])
    train(compiled, torch.randn(64, 32))
    assert gact_fx.uncompile(compiled) is loss
    # Whoever still has it runs the function.
    x = torch.randn(64, 32)
    (found,), (exact,) = (torch.autograd.grad(call(x), weight) for call in (compiled, loss))
    assert torch.equal(found, exact)
    with pytest.raises(ValueError, match="was not compiled"):
        gact_fx.inspect(compiled)


def test_all_modules_within_a_model() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    for layer in (model[0], model[2]):
        gact_fx.compile(layer, inner="eager")
    train(lambda x: model(x).sum(), torch.randn(64, 64))
    gact_fx.uncompile(model)
    assert all(session_of(layer) is None and layer._compiled_call_impl is None for layer in model)


def test_torch_compile_around_it_runs_the_model_itself() -> None:
    model, batch = gact_fx.compile(Mixed(), inner="eager", sample_batches=[mixed_batch()]), mixed_batch()
    around = torch.compile(model, backend="aot_eager")
    train(around, *batch)
    gact_fx.uncompile(model)
    model.zero_grad()
    reference = Mixed()
    reference.load_state_dict(model.state_dict())
    around(*batch).backward(), reference(*batch).backward()
    for found, exact in zip(gradients(model), gradients(reference), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6)


def test_between_forward_and_backward(caplog: pytest.LogCaptureFixture) -> None:
    """What a graph saved is read by what compressed it, and nothing is planned any more."""
    model, reference = Mixed(), Mixed()
    reference.load_state_dict(model.state_dict())
    gact_fx.compile(model, inner="eager", budget_bits=8)
    loss = model(*mixed_batch())
    gact_fx.uncompile(model)
    with caplog.at_level("INFO", "gact_fx"):
        loss.backward(), reference(*mixed_batch()).backward()
    assert not [record for record in caplog.records if record.name == "gact_fx"]
    for found, exact in zip(gradients(model), gradients(reference), strict=True):
        torch.testing.assert_close(found, exact, rtol=0.1, atol=0.02)
    train(model, *mixed_batch())
    assert session_of(model) is None


@pytest.mark.parametrize("model", [Mixed(), lambda x: x, torch.relu])
def test_what_was_not_compiled(model: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"gact_fx\.uncompile: this .* was not compiled by gact_fx\.compile"):
        gact_fx.uncompile(model)


def test_ddp_loses_its_hook(group_of_one: None) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh()))
    gact_fx.compile(model, inner="eager")
    train(lambda x: model(x).sum(), torch.randn(64, 64), steps=3)
    assert len(model._forward_pre_hooks) == 1 and session_of(model).plan is not None  # type: ignore[union-attr]
    gact_fx.uncompile(model)
    assert not model._forward_pre_hooks and session_of(model) is None
    assert model.module._compiled_call_impl is None
    train(lambda x: model(x).sum(), torch.randn(64, 64))
