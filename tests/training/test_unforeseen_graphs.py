"""Graphs that the plan was made without are profiled in a later step."""

import weakref
from typing import Any

import pytest
import torch
from conftest import gradients, relative_error
from torch import nn
from torch.nn import functional as F
from zoo_networks import build

import gact_fx
from gact_fx.graphs.interpreter import GraphInterpreter
from gact_fx.training.lifecycle import State
from gact_fx.training.model import session_of

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Breaks its graph in the first call, has dropout in training, and another last layer where ``second`` is given."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.other = nn.Linear(32, 64), nn.Linear(64, 8), nn.Linear(64, 16)
        self.is_prepared = not breaks

    def forward(self, x: torch.Tensor, second: bool = False) -> torch.Tensor:
        h = F.gelu(self.first(x))
        if not self.is_prepared:
            self.is_prepared = True
            torch._dynamo.graph_break()
        h = F.dropout(h.tanh(), 0.1, self.training)
        return (F.silu(self.other(h)).exp() if second else torch.sigmoid(self.last(h))).square().mean()


def has_plans_for_all(model: nn.Module) -> bool:
    """Whether the plan was made with every graph that the model now runs."""
    session = session_of(model)
    assert session is not None and session.plan is not None and session.graphs
    return all(session.plan.graph(graph.plan.fingerprint) is not None for graph in session.graphs)


def steps(model: nn.Module, count: int, **arguments: Any) -> None:
    for _ in range(count):
        model(X, **arguments).backward()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_first_call_that_breaks_the_graph(inner: str) -> None:
    model = gact_fx.compile(Net(breaks=True), inner=inner)
    steps(model, 4)
    assert has_plans_for_all(model)
    plan = gact_fx.inspect(model).plan
    # The graphs of the first call take no part in the budget any more.
    assert plan is not None and len(plan.graphs) == 1 and plan.variance is not None


def test_sample_batches_see_what_a_second_call_runs() -> None:
    model = gact_fx.compile(Net(breaks=True), inner="eager", sample_batches=[(X,)])
    steps(model, 1)
    assert has_plans_for_all(model)


@pytest.mark.slow
def test_what_the_first_call_left_compiled_is_not_what_a_plan_runs() -> None:
    """Segformer's first call installs hooks: its frames are left to run in pieces, until they are compiled anew."""
    pytest.importorskip("transformers")
    model, batch, loss_fn = build("segformer")
    gact_fx.compile(model, budget_bits=4, inner="eager", sample_batches=[batch], loss_fn=loss_fn)
    loss_fn(model, batch).backward()
    assert has_plans_for_all(model)


@pytest.mark.parametrize("dynamic", [None, True])
def test_profiled_in_evaluation_and_then_trained(dynamic: bool | None) -> None:
    model = gact_fx.compile(Net().eval(), inner="eager", dynamic=dynamic)
    steps(model, 2)
    assert has_plans_for_all(model)
    model.train()
    steps(model, 3)
    assert has_plans_for_all(model)
    model.zero_grad()
    exact = Net()
    exact.load_state_dict(model.state_dict())
    for net in (model, exact):
        torch.manual_seed(1)
        net(X).backward()
    assert relative_error(gradients(model), gradients(exact)) < 0.2


def test_among_ranks_the_report_tells_of_graphs_without_a_plan() -> None:
    """One rank does not profile again on its own."""
    model = gact_fx.compile(Net().eval(), inner="eager")
    steps(model, 2)
    session = session_of(model)
    assert session is not None
    session.sample(is_first=True)
    model.train()
    steps(model, 3)
    assert not has_plans_for_all(model)
    (warning,) = gact_fx.inspect(model).warnings
    assert "the plan was made without graph" in warning


def test_batches_of_other_sizes_are_no_reason_to_profile_again() -> None:
    """While a model changes from evaluation to training its batches may vary, too."""
    model = gact_fx.compile(Net().eval(), inner="eager")
    for rows in (64, 48, 80):
        model(X.repeat(2, 1)[:rows]).backward()
    session = session_of(model)
    assert session is not None and session._afterthoughts == 0
    model.train()
    for rows in (64, 32, 56, 96):
        model(X.repeat(2, 1)[:rows]).backward()
    assert session._afterthoughts == 1 and has_plans_for_all(model)
    assert any(tensor.dynamic for graph in session.graphs for tensor in graph.analysis.saved)


@pytest.mark.parametrize("dynamic", [None, True])
def test_profiled_frozen_and_then_trained(dynamic: bool | None) -> None:
    net = Net()
    net.first.requires_grad_(False)
    model = gact_fx.compile(net, inner="eager", dynamic=dynamic)
    steps(model, 2)
    net.first.requires_grad_(True)
    steps(model, 3)
    assert has_plans_for_all(model)


def test_graphs_that_take_turns_are_all_planned() -> None:
    model = gact_fx.compile(Net(), inner="eager")
    for step in range(8):
        steps(model, 1, second=step % 2 == 1)
    assert has_plans_for_all(model)
    plan = gact_fx.inspect(model).plan
    assert plan is not None and len(plan.graphs) == 2


def test_a_plan_that_was_given_stays() -> None:
    model = gact_fx.compile(Net().eval(), inner="eager", sample_batches=[(X,)])
    plan = gact_fx.inspect(model).plan
    other = gact_fx.compile(Net().eval(), inner="eager", plan=plan)
    steps(other, 1)
    other.train()
    steps(other, 3)
    assert gact_fx.inspect(other).plan is plan


def test_a_model_that_runs_several_times_in_a_step() -> None:
    model = gact_fx.compile(Net().eval(), inner="eager")
    for is_training in (False, False, True, True, True, True):
        model.train(is_training)
        sum(model(X) for _ in range(4)).backward()
    assert has_plans_for_all(model)
    session = session_of(model)
    # What four runs of one step ask for counts once.
    assert session is not None and session._afterthoughts == 1


def test_a_forward_pass_that_the_loss_ignores() -> None:
    model = gact_fx.compile(Net().eval(), inner="eager")
    steps(model, 2)
    model.train()
    batches = []
    for _ in range(8):
        x = X.clone()
        batches.append(weakref.ref(x))
        loss = model(x)
        model(x)
        loss.backward()
        del x, loss
    assert has_plans_for_all(model)
    # Nothing of a step that was recorded stays.
    assert sum(batch() is not None for batch in batches) <= 1


def test_graphs_that_do_not_run_any_more_take_nothing_from_the_budget() -> None:
    model = gact_fx.compile(Net().eval(), inner="eager")
    steps(model, 2)
    model.train()
    steps(model, 4)
    plan = gact_fx.inspect(model).plan
    assert plan is not None and len(plan.graphs) == 1


def test_a_step_that_fails_when_it_is_profiled_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gact_fx.compile(Net().eval(), inner="eager")
    steps(model, 2)
    model.train()
    run, failures = GraphInterpreter.call_function, 0

    def fail(self: GraphInterpreter, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.gact_fx.compress.default:
            raise torch.OutOfMemoryError("in a graph that is profiled")
        return run(self, target, args, kwargs)

    for _ in range(12):
        session = session_of(model)
        assert session is not None
        with monkeypatch.context() as patch:
            if session.lifecycle.state is State.PROFILING_AGAIN:
                patch.setattr(GraphInterpreter, "call_function", fail)
            try:
                steps(model, 1)
            except torch.OutOfMemoryError:
                failures += 1
    assert failures == 3


def test_a_plan_of_two_graphs_stays_when_one_of_them_is_profiled_again() -> None:
    model = gact_fx.compile(Net(), inner="eager", profile_every=5)
    for step in range(14):
        steps(model, 1, second=step % 2 == 1)
    plan = gact_fx.inspect(model).plan
    assert plan is not None and len(plan.graphs) == 2
