"""Graphs that the plan was made without, among two ranks: all of them profile the same step again, or none does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import relative_error
from test_distributed import Block, Scenario, batch, plan_of, run_ranks
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

import gact_fx
from gact_fx.training.session import Session

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
OPTIONS: dict[str, Any] = {"inner": "eager", "budget_bits": 6, "min_elements": 64}


class Net(nn.Module):
    """Has dropout in training, and in training runs a block once more where it is ``special``."""

    def __init__(self, dropout: float = 0.1, special: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(64), Block(64)])
        self.dropout, self.special = dropout, special

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = F.dropout(block(x), self.dropout, self.training)
        if self.special and self.training:
            x = torch.sigmoid(self.blocks[0](x))
        return x.square().mean()


class Loop:
    """A model under DDP beside the same one uncompressed; what each step ran by, and how far its gradient was off."""

    def __init__(self, rank: int, net: Net, **options: Any) -> None:
        self.rank, self.net, self.exact = rank, net, copy.deepcopy(net)
        gact_fx.compile(net, **{**OPTIONS, **options})
        self.wrap()
        self.number = 0
        self.plans: list[str] = []
        self.errors: list[float] = []
        self.has_all: list[bool] = []

    def wrap(self) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self.models = [DistributedDataParallel(model) for model in (self.net, self.exact)]

    @property
    def session(self) -> Session:
        session = self.net._gact_fx_session
        assert isinstance(session, Session)
        return session

    def steps(self, count: int, rows: int = 64) -> None:
        for _ in range(count):
            for model in self.models:
                torch.manual_seed(self.number)
                model.zero_grad()
                model(batch(self.rank, self.number, rows)).backward()
            found, exact = ([p.grad for p in model.parameters() if p.requires_grad] for model in self.models)
            self.errors.append(relative_error(found, exact))  # type: ignore[arg-type]
            self.plans.append(plan_of(self.net))
            plan, running = self.session.plan, self.session._running
            self.has_all.append(plan is not None and running <= {graph.fingerprint for graph in plan.graphs})
            self.number += 1

    def result(self) -> dict[str, Any]:
        report = gact_fx.inspect(self.net)
        return {
            "plans": self.plans, "errors": self.errors, "has all": self.has_all, "warnings": report.warnings,
            "ratio": report.ratio, "graphs": len(self.session.plan.graphs),  # type: ignore[union-attr]
            "afterthoughts": self.session._afterthoughts,
        }  # fmt: skip


def evaluated(rank: int, **options: Any) -> dict[str, Any]:
    """Profiled in evaluation mode, and then trained, some steps later."""
    loop = Loop(rank, Net().eval(), **options)
    loop.steps(5)
    for model in loop.models:
        model.train()
    loop.steps(4)
    return loop.result()


def of_many_sizes(rank: int) -> dict[str, Any]:
    """As before, with sizes that vary."""
    return evaluated(rank, dynamic=True)


def frozen(rank: int) -> dict[str, Any]:
    """Profiled with a frozen first layer; DDP, which has to know what is trained, is made anew behind that."""
    net = Net()
    net.blocks[0].requires_grad_(False)
    loop = Loop(rank, net)
    loop.steps(4)
    for model in (loop.net, loop.exact):
        model.requires_grad_(True)
    loop.wrap()
    loop.steps(4)
    return loop.result()


def on_one_rank(rank: int) -> dict[str, Any]:
    """The graph that the plan lacks runs on one rank alone."""
    loop = Loop(rank, Net(dropout=0.0, special=rank == 1).eval())
    loop.steps(4)
    for model in loop.models:
        model.train()
    loop.steps(4)
    return loop.result()


def not_finite(rank: int) -> dict[str, Any]:
    """The step that is profiled again has NaN on one rank, and the next one takes its place."""
    loop = Loop(rank, Net().eval())
    loop.steps(4)
    for model in loop.models:
        model.train()
    loop.steps(1)
    handles = [model.register_forward_hook(lambda *args: args[-1] * float("nan")) for model in loop.models if rank == 1]
    loop.steps(1)
    for handle in handles:
        handle.remove()
    loop.steps(3)
    return loop.result()


def evaluates_alone(rank: int) -> dict[str, Any]:
    """One rank evaluates with gradients, which the other one knows nothing of."""
    loop = Loop(rank, Net())
    loop.steps(4)
    if rank == 1:
        for number in range(3):
            loop.models[0].eval()(batch(1, 40 + number))
        loop.models[0].train()
    loop.steps(3)
    return loop.result()


def sharded(rank: int) -> dict[str, Any]:
    """FSDP2 in evaluation mode, and then in training."""
    from torch.distributed.fsdp import fully_shard

    net = Net().eval()
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    gact_fx.compile(net, **OPTIONS)
    plans = []
    for number in range(9):
        net.train(number >= 4)
        net(batch(rank, number)).backward()
        net.zero_grad()
        plans.append(plan_of(net))
    return {"plans": plans, "errors": [], "warnings": gact_fx.inspect(net).warnings}


SCENARIOS: list[Scenario] = [evaluated, of_many_sizes, frozen, on_one_rank, not_finite, evaluates_alone, sharded]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(SCENARIOS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_all_ranks_train_by_a_plan_for_what_they_run(results: list[dict[str, Any]], name: str) -> None:
    one, other = (result[name] for result in results)
    assert one["plans"] == other["plans"] and one["plans"][-1] != "none"
    assert not any("the plan was made without" in warning for warning in one["warnings"] + other["warnings"])
    assert all(error < 0.08 for error in one["errors"] + other["errors"] if error == error)
    if "has all" in one:
        assert one["has all"][-1] and other["has all"][-1]


@pytest.mark.parametrize("name", ["evaluated", "of_many_sizes", "frozen"])
def test_the_plan_is_made_anew_two_steps_after_the_change(results: list[dict[str, Any]], name: str) -> None:
    found, change = results[0][name], len(results[0][name]["plans"]) - 4
    assert len(set(found["plans"][1 : change + 2])) == 1 and found["plans"][change + 2] != found["plans"][change]
    # Graphs that do not run any more take nothing from the budget.
    assert found["afterthoughts"] == 1 and found["graphs"] == 1 and found["ratio"] > 3


def test_a_plan_knows_the_graphs_of_all_ranks(results: list[dict[str, Any]]) -> None:
    assert [result["on_one_rank"]["graphs"] for result in results] == [2, 2]
    assert results[0]["on_one_rank"]["afterthoughts"] == 1


def test_a_step_that_says_nothing_is_taken_again(results: list[dict[str, Any]]) -> None:
    assert [result["not_finite"]["afterthoughts"] for result in results] == [2, 2]


def test_evaluation_on_one_rank_is_waited_for_on_none(results: list[dict[str, Any]]) -> None:
    assert [result["evaluates_alone"]["afterthoughts"] for result in results] == [0, 0]


def test_rows_that_were_kept_are_measured_before_the_ranks_meet(group_of_one: None) -> None:
    from torch.nn.parallel import DistributedDataParallel

    net = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
    model = DistributedDataParallel(gact_fx.compile(net, inner="eager"))
    states = []
    for _ in range(3):
        model(torch.randn(4096, 256)).square().mean().backward()
        states.append(plan_of(net) != "none")
    assert states == [False, True, True]
