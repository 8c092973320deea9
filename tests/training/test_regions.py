"""Blocks that ``torch.compiler.nested_compile_region`` marks are compiled once, and planned and counted all."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from activation_bytes import activation_bytes
from peak_bytes import peak_bytes
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gact_fx
from gact_fx.training.model import session_of

WIDTH, ROWS = 64, 128
Run = Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.wide, self.back = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.back(F.gelu(self.wide(self.norm(x)))))


class Narrow(nn.Module):
    """A region of another kind, which writes to its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.norm = nn.Linear(WIDTH, WIDTH // 2), nn.BatchNorm1d(WIDTH // 2)
        self.back = nn.Linear(WIDTH // 2, WIDTH)

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(torch.tanh(self.norm(self.there(x))))


class Outer(nn.Module):
    """Regions in a region, with code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.linear = Block(), Block(), nn.Linear(WIDTH, WIDTH)

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.linear(self.first(x))))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(lambda y: torch.tanh(self.linear(y)), x, use_reentrant=False)


class Branches(nn.Module):
    """A region with two inputs and three results, one of which nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.tanh(self.left(x)) * y, F.gelu(self.right(y)) + x, x.detach().sum()


class Model(nn.Module):
    def __init__(self, blocks: list[nn.Module], run: Run | None = None) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks), nn.Linear(WIDTH, 10)
        self.run = run or one_after_another

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.run(self.blocks, F.gelu(self.first(x)))
        return F.cross_entropy(self.last(x), torch.zeros(len(x), dtype=torch.long))


def one_after_another(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def tied(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = blocks[0](x)
    return x


def checkpointed(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def under_autocast(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return one_after_another(blocks, x).float()


def without_gradient(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = blocks[0](x)
    return one_after_another(blocks[1:], x) + y


def in_chunks(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    parts = x.chunk(2)
    return torch.cat([blocks[0](parts[0]), blocks[1](parts[1])])


def branching(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    for block in blocks:
        x, y, _ = block(x, y)
    return x + y


# With how often the graphs run that stand for the regions; none where these are code of the whole graph.
MODELS: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "equal": (lambda: Model([Block(0.1) for _ in range(3)]), [3]),
    "two kinds": (lambda: Model([Block(), Narrow(), Block(), Narrow(), Block()]), [3, 2]),
    "regions in regions": (lambda: Model([Outer(), Outer()]), [4, 2]),
    "tied": (lambda: Model([Block()], tied), [3]),
    "checkpointing inside": (lambda: Model([Checkpointed() for _ in range(3)]), [3]),
    "several results": (lambda: Model([Branches() for _ in range(3)], branching), [3]),
    # With torch 2.11 regions that read views of a batch are not taken for equal.
    "of chunks": (lambda: Model([Block(), Block()], in_chunks), [2] if torch.__version__ >= "2.13" else []),
    "checkpointed": (lambda: Model([Block() for _ in range(3)], checkpointed), []),
    "autocast": (lambda: Model([Block() for _ in range(3)], under_autocast), []),
    "no gradient": (lambda: Model([Block() for _ in range(3)], without_gradient), []),
}


def rows(count: int = ROWS) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0))


def step(model: Callable[..., Any], x: torch.Tensor) -> int:
    """Bytes held between forward and backward of one training step, by the meter."""
    assert isinstance(model, nn.Module)
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(x)
    found = activation_bytes(loss, exclude=[*model.parameters(), *model.buffers(), x])
    loss.backward()
    return found


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def runs(report: gact_fx.Report) -> list[int]:
    """How often graphs run that run more than once."""
    return sorted({row.graph: row.runs for row in report.rows if row.runs > 1}.values(), reverse=True)


@pytest.mark.parametrize("name", MODELS)
def test_every_region_counts_and_has_its_gradient(name: str) -> None:
    make, expected = MODELS[name]
    torch.manual_seed(0)
    model = make()
    eager, x = copy.deepcopy(model), rows()
    compiled = gact_fx.compile(model, budget_bits=8, inner="eager")
    held = [step(compiled, x) for _ in range(3)]
    for _ in held:
        step(eager, x)
    report = gact_fx.inspect(compiled)
    assert (report.bytes_after, runs(report)) == (held[-1], expected)
    assert report.bytes_before is not None and report.bytes_before > 2 * held[-1]
    assert (gradient(model) - gradient(eager)).norm() < 0.02 * gradient(eager).norm()
    for mine, its in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, its)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["equal", "two kinds", "regions in regions", "autocast"])
def test_with_inductor(name: str) -> None:
    make, expected = MODELS[name]
    torch.manual_seed(0)
    compiled = gact_fx.compile(make(), budget_bits=4, inner="inductor")
    held = [step(compiled, rows()) for _ in range(3)]
    report = gact_fx.inspect(compiled)
    assert (report.bytes_after, runs(report)) == (held[-1], expected)


def test_budget_and_peak_are_those_of_all_regions(caplog: pytest.LogCaptureFixture) -> None:
    """More regions than calls of a model that wait for their backward passes, each with gradients of its own."""
    torch.manual_seed(0)
    count, x, budget = 12, rows(512), 1_600_000
    model = Model([Block() for _ in range(count)])
    with caplog.at_level(logging.WARNING, "gact_fx"):
        compiled = gact_fx.compile(model, sample_batches=[(x,)], budget_bytes=budget, inner="eager")
        held = [step(compiled, x) for _ in range(2)]
    session, report = session_of(compiled), gact_fx.inspect(compiled)
    assert session is not None and max(profile.runs for profile in session.profiles.values()) == count
    assert report.bytes_after == held[-1] and runs(report) == [count]
    assert not any("forward" in record.message or "not profiled" in record.message for record in caplog.records)
    model.zero_grad()
    peak = peak_bytes(lambda: compiled(x))
    gradients = sum(p.nbytes for p in model.parameters())
    assert peak.left == pytest.approx(gradients, rel=0.02)
    assert report.peak_activations is not None and report.peak_activations <= budget
    assert report.peak_predicted == pytest.approx(peak.step, rel=0.02)


def test_the_variance_is_that_of_all_regions() -> None:
    torch.manual_seed(0)
    batch = (rows(),)
    model = gact_fx.compile(Model([Block() for _ in range(4)]), sample_batches=[batch], budget_bits=4, inner="eager")
    step(model, *batch)
    plan = gact_fx.inspect(model).plan
    assert plan is not None and plan.variance is not None
    measured = gact_fx.measure_gradient_error(model, [batch], draws=64).total.variance
    assert plan.variance == pytest.approx(measured, rel=0.35)


def test_batches_of_other_sizes_and_evaluation() -> None:
    torch.manual_seed(0)
    model = Model([Block() for _ in range(3)])
    eager = copy.deepcopy(model)
    compiled = gact_fx.compile(model, budget_bits=8, inner="eager")
    for count in (ROWS, 96, 64, ROWS):
        held = step(compiled, rows(count))
        step(eager, rows(count))
        assert (gradient(model) - gradient(eager)).norm() < 0.02 * gradient(eager).norm()
    assert gact_fx.inspect(compiled).bytes_after == held
    with torch.no_grad():
        torch.testing.assert_close(compiled(rows()), eager(rows()))


def test_of_a_backend_regions_are_code_of_the_graph() -> None:
    torch.manual_seed(0)
    model = Model([Block() for _ in range(3)])
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="gact", options={"budget_bits": 8, "inner": "eager"})
    held = [step(compiled, rows()) for _ in range(3)]
    assert held[-1] < step(eager, rows()) / 3
    assert (gradient(model) - gradient(eager)).norm() < 0.02 * gradient(eager).norm()


def test_an_estimate_counts_every_region() -> None:
    torch.manual_seed(0)
    model = Model([Block() for _ in range(3)])
    estimate = gact_fx.estimate(model, (rows(),), budget_bits=8, inner="eager")
    compiled = gact_fx.compile(model, budget_bits=8, inner="eager")
    held = [step(compiled, rows()) for _ in range(2)]
    assert estimate.held == pytest.approx(held[-1], rel=0.05)
