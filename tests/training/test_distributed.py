"""Two processes over gloo: gradients are those of eager DDP, and the ranks agree on the plan."""

from __future__ import annotations

import copy
import json
import logging
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import relative_error
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.utils.checkpoint import checkpoint

import gact_fx
from gact_fx.graphs.dynamo import in_backward
from gact_fx.passes.graph_analysis import GraphAnalysis
from gact_fx.planning.graph_profile import GraphProfile, merged
from gact_fx.records import Sensitivity
from gact_fx.training.ranks import Ranks
from gact_fx.training.session import Session

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
OPTIONS: dict[str, Any] = {"inner": "eager", "budget_bits": 6, "min_elements": 64}
Scenario = Callable[[int], dict[str, Any]]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batch(rank: int, step: int, rows: int = 64) -> torch.Tensor:
    """The ranks' data differ in size, so that what they measure does."""
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(100 * step + rank)) * (1 + 3 * rank)


def plan_of(model: Any) -> str:
    plan = model._gact_fx_session.plan
    return "none" if plan is None else json.dumps(asdict(plan))


class Twins:
    """A compiled model under DDP and the same one uncompressed; ``errors`` of the gradients, ``plans`` step by step."""

    def __init__(self, model: Any, holder: Any, exact: Any, rank: int) -> None:
        self.model, self.exact, self.rank, self.holder = model, exact, rank, holder
        self.plans: list[str] = []
        self.errors: list[float] = []

    def step(self, number: int, rows: int = 64, scale: float = 1.0) -> None:
        x = batch(self.rank, number, rows)
        for model in (self.model, self.exact):
            (model(x) * scale).backward()
        found, exact = ([p.grad for p in model.parameters()] for model in (self.model, self.exact))
        self.errors.append(relative_error(found, exact))
        with torch.no_grad():
            for model in (self.model, self.exact):
                for p in model.parameters():
                    assert p.grad is not None
                    p -= 0.01 * torch.nan_to_num(p.grad, 0.0, 0.0, 0.0)
                    p.grad = None
            for p, q in zip(self.model.parameters(), self.exact.parameters(), strict=True):
                q.copy_(p)
        self.plans.append(plan_of(self.holder))

    def result(self) -> dict[str, Any]:
        return {"plans": self.plans, "errors": self.errors, "parameters": float(next(self.model.parameters()).sum())}


def inside(rank: int) -> dict[str, Any]:
    """Compiled, then wrapped; ranks whose steps go wrong, differ in size, or are their own."""
    from torch.nn.parallel import DistributedDataParallel

    net = Net()
    exact = DistributedDataParallel(copy.deepcopy(net))
    gact_fx.compile(net, **OPTIONS)
    twins = Twins(DistributedDataParallel(net), net, exact, rank)
    twins.step(0, scale=float("nan") if rank == 1 else 1.0)
    if rank == 1:
        # A pass that the other rank knows nothing of.
        net(batch(1, 9)).backward()
        net.zero_grad()
    for number in range(1, 5):
        twins.step(number, rows=64 - 8 * rank * number)
    return twins.result()


def early(rank: int) -> dict[str, Any]:
    """One rank has a plan of its own when it meets the other."""
    from torch.nn.parallel import DistributedDataParallel

    net = Net()
    exact = DistributedDataParallel(copy.deepcopy(net))
    gact_fx.compile(net, **OPTIONS)
    if rank == 1:
        net(batch(1, 9)).backward()
        net.zero_grad()
    twins = Twins(DistributedDataParallel(net), net, exact, rank)
    for number in range(2):
        twins.step(number)
    return twins.result()


def around(rank: int) -> dict[str, Any]:
    """Compiled around DDP, on sample batches."""
    from torch.nn.parallel import DistributedDataParallel

    net = Net()
    exact = DistributedDataParallel(copy.deepcopy(net))
    samples = [batch(rank, 20), batch(rank, 21)]
    model = gact_fx.compile(DistributedDataParallel(net), sample_batches=samples, **OPTIONS)
    alone = [asdict(entry) for graph in gact_fx.inspect(model).plan.graphs for entry in graph.tensors]  # type: ignore[union-attr]
    twins = Twins(model, model, exact, rank)
    for number in range(3):
        twins.step(number)
    return {**twins.result(), "alone": alone}


def again(rank: int) -> dict[str, Any]:
    """Profiled again every other step, with gradient accumulation."""
    from torch.nn.parallel import DistributedDataParallel

    net = Net()
    exact = DistributedDataParallel(copy.deepcopy(net))
    twins = Twins(DistributedDataParallel(gact_fx.compile(net, profile_every=2, **OPTIONS)), net, exact, rank)
    for number in range(7):
        with twins.model.no_sync(), twins.exact.no_sync():
            for model in (twins.model, twins.exact):
                model(batch(rank, 50 + number)).backward()
        if number == 3:
            with torch.no_grad():
                for model in (twins.model, twins.exact):
                    model.module.blocks[1].b.weight.mul_(30)
        twins.step(number)
    return twins.result()


def buckets(rank: int) -> dict[str, Any]:
    """DDPOptimizer cuts the graph at DDP's buckets, of a megabyte at least."""
    from torch.nn.parallel import DistributedDataParallel

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(16, 512), nn.Linear(512, 512), nn.Linear(512, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))).square().mean()

    net = Wide()
    exact = DistributedDataParallel(copy.deepcopy(net))
    twins = Twins(DistributedDataParallel(gact_fx.compile(net, **OPTIONS), bucket_cap_mb=1), net, exact, rank)
    for number in range(3):
        twins.step(number)
    report = gact_fx.inspect(net)
    return {**twins.result(), "graphs": len(report.graphs), "ratio": report.ratio}


def failing(rank: int) -> dict[str, Any]:
    """On one rank measuring always fails."""
    from torch.nn.parallel import DistributedDataParallel

    def fail(steps: object) -> bool:
        raise MemoryError("on one rank")

    net = Net()
    exact = DistributedDataParallel(copy.deepcopy(net))
    gact_fx.compile(net, **OPTIONS)
    if rank == 1:
        net._gact_fx_session.measure = fail  # type: ignore[union-attr]
    twins = Twins(DistributedDataParallel(net), net, exact, rank)
    for number in range(5):
        twins.step(number)
    return twins.result()


def sharded(rank: int, call: Callable[[Any, torch.Tensor], Any] = lambda model, x: model(x)) -> dict[str, Any]:
    """FSDP2: each block on its own, and the root."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    net = Net()
    exact = copy.deepcopy(net)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    model = gact_fx.compile(net, **OPTIONS)
    errors, plans = [], []
    for number in range(4):
        (sum(exact(batch(r, number)) for r in range(2)) / 2).backward()
        call(model, batch(rank, number)).backward()
        found = [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]
        errors.append(relative_error(found, [p.grad for p in exact.parameters()]))  # type: ignore[misc]
        model.zero_grad(), exact.zero_grad()  # type: ignore[func-returns-value]
        plans.append(plan_of(model))
    return {"errors": errors, "plans": plans, "ratio": gact_fx.inspect(model).ratio, "parameters": 0.0}


def sharded_and_checkpointed(rank: int) -> dict[str, Any]:
    """The ranks do not meet where checkpointing runs forward again in backward."""
    meet, where = Ranks._meet, []

    def noted(ranks: Ranks, is_first: bool) -> None:
        where.append(in_backward())
        meet(ranks, is_first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "_meet", noted)
        found = sharded(rank, lambda model, x: checkpoint(model, x, use_reentrant=False))
    return {**found, "met in backward": where}


def uneven(rank: int) -> dict[str, Any]:
    """A budget of bytes, of which eager regions take more on one rank than on the other."""
    from torch.nn.parallel import DistributedDataParallel

    class Broken(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.in_eager(self.blocks[0](x))
            return self.blocks[1](hidden).square().mean()

        @torch.compiler.disable
        def in_eager(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(1 + 2 * rank):
                x = torch.sin(x)
            return x

    net = Broken()
    exact = DistributedDataParallel(copy.deepcopy(net))
    options: dict[str, Any] = {"inner": "eager", "budget_bytes": 20_000, "min_elements": 64}
    twins = Twins(DistributedDataParallel(gact_fx.compile(net, **options)), net, exact, rank)
    for number in range(4):
        twins.step(number)
    held = sum(row.bytes_after for row in gact_fx.inspect(net).rows)
    return {**twins.result(), "held": held, "eager": net._gact_fx_session.eager_bytes().held}  # type: ignore[union-attr, operator]


SCENARIOS: list[Scenario] = [
    inside, early, around, again, buckets, failing, sharded, sharded_and_checkpointed, uneven,
]  # fmt: skip


def work(rank: int, port: int, folder: str, scenarios: list[Scenario]) -> None:
    torch.set_num_threads(1)
    logging.getLogger("gact_fx").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    results = {}
    for scenario in scenarios:
        torch.manual_seed(0)
        torch._dynamo.reset()
        results[scenario.__name__] = scenario(rank)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def run_ranks(scenarios: list[Scenario], folder: Path) -> list[dict[str, Any]]:
    """What the scenarios found, by rank; in one pair of processes, which takes seconds to start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(work, (port, str(folder), scenarios), 2)  # type: ignore[attr-defined, no-untyped-call]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(SCENARIOS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_the_ranks_agree(results: list[dict[str, Any]], name: str) -> None:
    one, other = (result[name] for result in results)
    assert one["plans"] == other["plans"] and one["parameters"] == other["parameters"]
    # A step with NaN has no error.
    errors = [error for error in one["errors"] if error == error]
    assert len(errors) >= len(one["errors"]) - 1 and all(error < 0.08 for error in errors)
    assert (one["plans"][-1] == "none") == (name == "failing")


def test_a_step_with_nan_on_one_rank_is_no_sample_on_any(results: list[dict[str, Any]]) -> None:
    plans = results[0]["inside"]["plans"]
    assert plans[:2] == ["none", "none"] and plans[2] != "none" and len(set(plans[2:])) == 1


def test_sensitivities_are_those_of_all_ranks(results: list[dict[str, Any]]) -> None:
    plan = json.loads(results[0]["around"]["plans"][0])
    found = [entry["sensitivity"] for graph in plan["graphs"] for entry in graph["tensors"]]
    alone = [[entry["sensitivity"] for entry in result["around"]["alone"]] for result in results]
    assert all(max(a, b) > 2 * min(a, b) for a, b in zip(*alone, strict=True))
    assert found == pytest.approx([(a + b) / 2 for a, b in zip(*alone, strict=True)])


def test_plans_change_on_all_ranks_at_once(results: list[dict[str, Any]]) -> None:
    assert len(set(results[0]["again"]["plans"])) > 2


def test_buckets_are_graphs_that_share_a_budget(results: list[dict[str, Any]]) -> None:
    assert results[0]["buckets"]["graphs"] > 1 and results[0]["buckets"]["ratio"] > 3


def test_where_one_rank_cannot_measure_none_compresses(results: list[dict[str, Any]]) -> None:
    errors = results[0]["failing"]["errors"]
    assert errors[0] > 1e-5 and errors[-1] < 1e-6


def test_a_budget_of_bytes_does_on_the_rank_with_most_in_eager_regions(results: list[dict[str, Any]]) -> None:
    one, other = (result["uneven"] for result in results)
    assert other["eager"] > 1.5 * one["eager"] > 0
    assert 0.7 * 20_000 < other["held"] <= 20_000


def test_sharded_parameters(results: list[dict[str, Any]]) -> None:
    assert results[0]["sharded"]["ratio"] > 3


def test_ranks_meet_outside_of_backward(results: list[dict[str, Any]]) -> None:
    met = results[0]["sharded_and_checkpointed"]["met in backward"]
    assert met and not any(met)


def test_profiles_of_ranks_with_different_graphs() -> None:
    """Each graph has what the ranks that ran it measured."""
    empty = GraphAnalysis((), ())

    def profile(runs: int, *values: float) -> GraphProfile:
        return GraphProfile(empty, {"x": [Sensitivity(value, {}) for value in values]}, runs)

    found = merged([{"a": profile(1, 1.0, 2.0), "b": profile(3, 5.0)}, {"c": profile(1, 7.0), "a": profile(2, 6.0)}])
    assert list(found) == ["a", "b", "c"] and (found["a"].runs, found["b"].runs) == (2, 3)
    assert found["a"].tensors().sensitivities["x"].value == 3.0


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
def test_inspection_looks_into_ddp(group_of_one: None, around: bool) -> None:
    from torch.nn.parallel import DistributedDataParallel

    net = Net()
    model = DistributedDataParallel(net if around else gact_fx.compile(net, **OPTIONS))
    if around:
        gact_fx.compile(model, **OPTIONS)
    for number in range(3):
        model(batch(0, number)).backward()
    report = gact_fx.inspect(model)
    assert report.ratio > 3 and not report.note
    assert {row.module.partition(".")[0] for row in report.rows} <= {"", "blocks"}


def test_without_other_ranks_a_session_plans_on_its_own() -> None:
    model = gact_fx.compile(Net(), **OPTIONS)
    model(batch(0, 0)).backward()
    assert plan_of(model) != "none" and isinstance(model._gact_fx_session, Session)
