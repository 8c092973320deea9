"""Activations that cross a graph break: whoever holds one stores it, and the report counts what it would share."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from activation_bytes import activation_bytes
from conftest import gradients
from torch import nn

import gact_fx

WIDTH, ROWS = 64, 128
NUMEL = WIDTH * ROWS


class Layer(nn.Module):
    """A graph of its own: Dynamo compiles what a frame that breaks calls, but nothing inside torch.nn."""

    def __init__(self, linear: nn.Module, after: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        self.linear, self.after = linear, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.linear(x))


class RunByEager(Layer):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class CrossAttended(nn.Module):
    """Layers with graph breaks before them, all of which read one activation, like a decoder's read the encoder's."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.encoder = Layer(nn.Linear(WIDTH, WIDTH), torch.sin)
        self.layers = nn.ModuleList(Layer(nn.Linear(WIDTH, WIDTH)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(x)
        total = memory
        for layer in self.layers:
            torch._dynamo.graph_break()
            total = total + layer(memory)
        return total


class Convolutions(CrossAttended):
    """The same with images, which the inner compiler may lay out otherwise than they were traced."""

    def __init__(self) -> None:
        super().__init__(3)
        self.encoder = Layer(nn.Conv2d(3, 8, 3), torch.sin)
        self.layers = nn.ModuleList(Layer(nn.Conv2d(8, 8, 3)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(x)
        total = torch.zeros(())
        for layer in self.layers:
            torch._dynamo.graph_break()
            total = total + layer(memory).square().mean()
        return total


class Scored(nn.Module):
    """A graph of its own, whose result is a view that it saves itself, as those of attention over graphs do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(1, 8, WIDTH // 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads = self.linear(x).view(-1, 8, WIDTH // 8)
        return heads, (heads * self.weight).sum(-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scored = Scored()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads, scores = self.scored(x)
        torch._dynamo.graph_break()
        return heads * scores.unsqueeze(-1)


def trained(model: nn.Module, batch: torch.Tensor, steps: int = 3) -> tuple[list[torch.Tensor], int]:
    """Gradients of the last of a few equal steps, and what the model itself held for it."""
    held = 0
    for _ in range(steps):
        model.zero_grad()
        result = model(batch)
        held = activation_bytes(result, exclude=[*model.parameters(), batch])
        result.sum().backward()
    return gradients(model), held


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    norm = sum(float(b.square().sum()) for b in exact) ** 0.5
    return sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True)) ** 0.5 / norm


# Of three dimensions, linear layers save views.
SHAPES = pytest.mark.parametrize("shape", [(ROWS, WIDTH), (4, ROWS // 4, WIDTH)])


@SHAPES
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_what_several_graphs_hold_is_counted_as_it_is_stored(inner: str, shape: tuple[int, ...]) -> None:
    model, batch = CrossAttended(), torch.randn(shape)
    exact, before = trained(copy.deepcopy(model), batch)
    ours = gact_fx.compile(copy.deepcopy(model), inner=inner, budget_bits=8, min_elements=64)
    found, held = trained(ours, batch)
    assert error(found, exact) < 0.01
    report = gact_fx.inspect(ours)
    # Uncompressed, all hold the one result of the encoder; codes are those of a graph alone.
    assert report.bytes_before == 2 * 4 * NUMEL == before
    assert held == report.bytes_after <= 6 * 9 / 8 * NUMEL
    assert report.average_bits is not None and 7 < report.average_bits <= 9


@SHAPES
@pytest.mark.parametrize("eager_first", [False, True])
def test_what_eager_pytorch_and_graphs_hold_is_counted_as_it_is_stored(
    eager_first: bool, shape: tuple[int, ...]
) -> None:
    model, batch = CrossAttended(2), torch.randn(shape)
    model.layers[0 if eager_first else 1] = RunByEager(nn.Linear(WIDTH, WIDTH))
    exact, before = trained(copy.deepcopy(model), batch)
    ours = gact_fx.compile(copy.deepcopy(model), inner="eager", budget_bits=8, min_elements=64)
    found, held = trained(ours, batch)
    assert error(found, exact) < 0.01
    report = gact_fx.inspect(ours)
    assert report.bytes_before == 2 * 4 * NUMEL == before
    assert held == report.bytes_after <= 3 * 9 / 8 * NUMEL
    (eager,) = [row for row in report.rows if row.graph is None]
    assert eager.bytes_before == 0 < eager.bytes_after


def test_a_budget_of_bytes_is_used_where_eager_pytorch_has_its_part() -> None:
    model, batch = CrossAttended(2), torch.randn(ROWS, WIDTH)
    model.layers[1] = RunByEager(nn.Linear(WIDTH, WIDTH))
    budget = 12_000
    ours = gact_fx.compile(model, inner="eager", budget_bytes=budget, min_elements=64)
    _, held = trained(ours, batch)
    assert 0.9 * budget < held <= budget


def test_figures_are_those_of_planned_steps_also_after_one_that_was_profiled_again() -> None:
    model, batch = CrossAttended(2), torch.randn(ROWS, WIDTH)
    model.layers[1] = RunByEager(nn.Linear(WIDTH, WIDTH))
    ours = gact_fx.compile(model, inner="eager", budget_bits=8, min_elements=64, profile_every=3)
    figures = []
    for _ in range(7):
        trained(ours, batch, 1)
        report = gact_fx.inspect(ours)
        figures.append((report.bytes_before, report.bytes_after))
    assert len(set(figures[1:])) == 1


def test_graph_by_graph_each_keeps_to_its_budget() -> None:
    model, batch = CrossAttended(), torch.randn(ROWS, WIDTH)
    model.layers = nn.ModuleList([model.layers[0]] * 5)
    options: dict[str, Any] = {"inner": "eager", "budget_bytes": 8_000, "min_elements": 64}
    ours = torch.compile(copy.deepcopy(model), backend="gact", options=options)
    _, held = trained(ours, batch)  # type: ignore[arg-type]
    # Two graphs with a budget each.
    assert held <= 2 * 8_000


@pytest.mark.slow
def test_convolutions_read_right_values_whatever_the_layout() -> None:
    model, batch = Convolutions(), torch.randn(4, 3, 20, 20).to(memory_format=torch.channels_last)
    exact, _ = trained(copy.deepcopy(model), batch)
    for inner in ("eager", "inductor"):
        ours = gact_fx.compile(copy.deepcopy(model), inner=inner, budget_bits=8, min_elements=64)
        assert error(trained(ours, batch)[0], exact) < 0.02, inner


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_view_that_a_graph_saves_and_returns_is_counted_once(inner: str, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = Attention(), torch.randn(ROWS, WIDTH)
    exact, before = trained(copy.deepcopy(model), batch)
    with caplog.at_level(logging.WARNING, "gact_fx"):
        ours = gact_fx.compile(model, inner=inner, budget_bits=8, min_elements=64)
        found, held = trained(ours, batch)
    # And its gradient is followed to the graph before.
    assert "reads the" not in caplog.text
    assert error(found, exact) < 0.01
    report = gact_fx.inspect(ours)
    assert (held, before) == (report.bytes_after, report.bytes_before)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_part_that_is_the_whole_of_one_batch_is_a_part_of_others(inner: str) -> None:
    """With varying sizes: rows that are all there are when the graph is traced."""

    class Head(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.linear(x[:ROWS]))

    class Heads(CrossAttended):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            memory = self.encoder(x)
            torch._dynamo.graph_break()
            return sum(layer(memory).square().sum() for layer in self.layers)

    model = Heads()
    model.layers = nn.ModuleList(Head(nn.Linear(WIDTH, WIDTH), after) for after in (torch.sin, torch.cos, torch.tanh))
    ours = gact_fx.compile(copy.deepcopy(model), inner=inner, budget_bits=8, min_elements=64, dynamic=True)
    for rows in (ROWS, ROWS, ROWS, 2 * ROWS, 3 * ROWS):
        batch = torch.randn(rows, WIDTH)
        assert error(trained(ours, batch, 1)[0], trained(model, batch, 1)[0]) < 0.01


def test_several_passes_and_several_backward_passes() -> None:
    model, batches = CrossAttended(), [torch.randn(ROWS, WIDTH) for _ in range(3)]
    ours = gact_fx.compile(copy.deepcopy(model), inner="eager", budget_bits=8, min_elements=64)
    trained(ours, batches[0])
    found = []
    for of in (ours, model):
        of.zero_grad()
        results = [of(batch) for batch in batches]
        results[1].sum().backward(retain_graph=True)
        for result in results:
            result.sum().backward()
        found.append(gradients(of))
    assert error(*found) < 0.01


@pytest.mark.parametrize(
    "how",
    [
        "one weight in graphs of its own",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("a weight each", "one layer")),
    ],
)
def test_the_gradient_error_is_that_which_is_predicted(how: str) -> None:
    """Errors of one activation's codes reach one weight's gradient several times over."""
    model, batches = CrossAttended(), [torch.randn(ROWS, WIDTH) for _ in range(2)]
    if how == "one layer":
        model.layers = nn.ModuleList([model.layers[0]] * 5)
    elif how == "one weight in graphs of its own":
        linear = model.layers[0].linear
        model.layers = nn.ModuleList(Layer(linear, after) for after in (torch.sin, torch.cos, torch.tanh, torch.erf))  # type: ignore[arg-type]
    ours = gact_fx.compile(
        model, inner="eager", budget_bits=3, min_elements=64, sample_batches=batches, loss_fn=lambda m, x: squares(m(x))
    )
    found = gact_fx.measure_gradient_error(ours, batches, lambda m, x: squares(m(x)), draws=32)
    assert 0.7 < found.total.variance / found.predicted_variance < 1.4  # type: ignore[operator]


def squares(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean()
