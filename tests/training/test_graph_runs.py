"""Models of several graphs, and of graphs that run several times in a step: what they hold is planned and reported."""

from typing import Any

import pytest
import torch
from activation_bytes import activation_bytes
from torch import nn

import gact_fx
from gact_fx.training.model import session_of

OPTIONS: dict[str, Any] = {"inner": "eager", "min_elements": 64}
WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Repeated(nn.Module):
    """The same graph many times over: equal blocks with graph breaks between them."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
            torch._dynamo.graph_break()
        return self.head(x).square().mean()


class Stage(nn.Module):
    """A block with a graph break inside: stages of different sizes share the code before it and that after it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH + 8 * index, WIDTH + 8 * (index + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        torch._dynamo.graph_break()
        return x


def stages(count: int) -> nn.Module:
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(Stage(index) for index in range(count))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for stage in self.stages:
                x = stage(x)
            return x.square().mean()

    return Stages()


def rows(count: int = 256) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0))


def held(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes held between forward and backward of one training step, by graphs and by eager PyTorch between them."""
    loss = model(x)
    found = activation_bytes(loss, exclude=[*model.parameters(), x])
    loss.backward()
    return found


def test_a_repeated_graph_counts_as_often_as_it_runs() -> None:
    model = gact_fx.compile(Repeated(), sample_batches=[(rows(),)], budget_bytes=40_000, **OPTIONS)
    found = [held(model, rows()) for _ in range(2)]
    report = gact_fx.inspect(model)
    assert max(found) <= 40_000
    assert found[-1] == pytest.approx(report.bytes_after, rel=0.02)
    assert max(row.runs for row in report.rows) > 1 and "x)" in str(report)


def test_variance_of_a_repeated_graph() -> None:
    batch = (rows(),)
    model = gact_fx.compile(Repeated(), sample_batches=[batch], budget_bits=4, **OPTIONS)
    model(*batch).backward()
    plan, session = gact_fx.inspect(model).plan, session_of(model)
    assert plan is not None and plan.variance is not None
    assert session is not None and session.eager_regions is not None
    # The plan foretells what the codes of graphs add; those of eager PyTorch between them add next to nothing here.
    session.eager_regions.bits = 8
    measured = gact_fx.measure_gradient_error(model, [batch], draws=64).total.variance
    assert plan.variance == pytest.approx(measured, rel=0.35)


def test_graphs_of_other_sizes_are_not_added_up() -> None:
    """The first change of the batch size has Dynamo trace the model anew, with a varying size."""
    model = gact_fx.compile(Repeated(1), sample_batches=[(rows(),)], **OPTIONS)
    held(model, rows())
    whole, before = held(model, rows()), gact_fx.inspect(model)
    for _ in range(8):
        found = held(model, rows(200))
    report = gact_fx.inspect(model)
    assert [step.name for step in report.steps] == ["largest", "last"]
    assert report.bytes_after == before.bytes_after == pytest.approx(whole, rel=0.02)
    assert report.steps[1].bytes_after == pytest.approx(found, rel=0.02)


@pytest.mark.slow
def test_stages_that_share_their_code_are_all_compressed() -> None:
    """Profiling and training compile each: together more often than Dynamo does for one piece of code."""
    model = gact_fx.compile(stages(6), sample_batches=[(rows(),)], **OPTIONS)
    for _ in range(2):
        found = held(model, rows())
    assert found == pytest.approx(gact_fx.inspect(model).bytes_after, rel=0.02)


@pytest.mark.slow
def test_planning_again_and_again() -> None:
    model = gact_fx.compile(stages(2), sample_batches=[(rows(),)], **OPTIONS)
    before = held(model, rows())
    session = session_of(model)
    assert session is not None and session.plan is not None
    for _ in range(6):
        session.adopt(session.plan)  # as when the bits change
        assert held(model, rows()) == before


def test_no_more_than_the_runs_before_backward_count() -> None:
    """Forward passes for a look at the loss hold nothing for long."""
    model = gact_fx.compile(Repeated(1), sample_batches=[(rows(),)], **OPTIONS)
    once = held(model, rows())
    for _ in range(5):
        model(rows())
    held(model, rows())
    assert gact_fx.inspect(model).bytes_after == pytest.approx(once, rel=0.02)
