"""Activations that cross a graph break are stored once for all who hold them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from activation_bytes import activation_bytes
from conftest import gradients
from test_budget import graph
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import gact_fx
from gact_fx.budget import choose_plan
from gact_fx.codec_layout import blob_nbytes
from gact_fx.config import Config
from gact_fx.passes.measure_rounding import step_variance
from gact_fx.records import Crossing
from gact_fx.shared_codes import SharedCodes, Storages

WIDTH, ROWS = 64, 128
NUMEL = WIDTH * ROWS
compress_once = torch.ops.gact_fx.compress_once.default
CODEC = (4, 256, 1, [0, 1], "dither")


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
def test_what_several_graphs_hold_is_stored_once(inner: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    model, batch = CrossAttended(), torch.randn(shape)
    exact, before = trained(copy.deepcopy(model), batch)
    ours = gact_fx.compile(copy.deepcopy(model), inner=inner, budget_bits=8, min_elements=64)
    found, held = trained(ours, batch)
    assert error(found, exact) < 0.01
    report = gact_fx.inspect(ours)
    # The encoder's result, and cos of what it is made of; the layers add nothing to them.
    assert held == report.bytes_after <= 2 * 9 / 8 * NUMEL
    assert report.bytes_before == 2 * 4 * NUMEL == before
    shared = [row for row in report.rows if row.graph == 1 and row.numel == NUMEL]
    assert sum(row.runs for row in shared) == 5
    assert sum(row.copies for row in shared if row.bytes_after) == 1
    assert report.average_bits is not None and 7 < report.average_bits <= 9

    # And by a plan that was saved.
    report.plan.save(tmp_path / "plan.json")
    again = gact_fx.compile(copy.deepcopy(model), inner=inner, plan=gact_fx.Plan.load(tmp_path / "plan.json"),
                            budget_bits=8, min_elements=64)  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(trained(again, batch, 1)[0], found, strict=True))
    assert trained(again, batch, 1)[1] == held


@SHAPES
@pytest.mark.parametrize("eager_first", [False, True])
def test_eager_pytorch_shares_the_codes_of_graphs(eager_first: bool, shape: tuple[int, ...]) -> None:
    model, batch = CrossAttended(2), torch.randn(shape)
    model.layers[0 if eager_first else 1] = RunByEager(nn.Linear(WIDTH, WIDTH))
    exact, before = trained(copy.deepcopy(model), batch)
    ours = gact_fx.compile(copy.deepcopy(model), inner="eager", budget_bits=8, min_elements=64)
    found, held = trained(ours, batch)
    assert error(found, exact) < 0.01
    report = gact_fx.inspect(ours)
    assert held == report.bytes_after <= 2 * 9 / 8 * NUMEL
    assert report.bytes_before == 2 * 4 * NUMEL == before
    (eager,) = [row for row in report.rows if row.graph is None]
    assert (eager.bytes_before, eager.bytes_after) == (0, 0)
    assert "stored once" in eager.reason


def test_a_budget_of_bytes_is_used_where_eager_pytorch_shares_codes() -> None:
    model, batch = CrossAttended(2), torch.randn(ROWS, WIDTH)
    model.layers[1] = RunByEager(nn.Linear(WIDTH, WIDTH))
    budget = 12_000
    ours = gact_fx.compile(model, inner="eager", budget_bytes=budget, min_elements=64)
    _, held = trained(ours, batch)
    assert 0.9 * budget < held <= budget


@pytest.mark.parametrize("options", [{"swap": True, "inner": "eager"}, {"mode": "reduce-overhead"}])
def test_codes_are_not_shared_where_they_are_moved_or_lie_at_fixed_places(options: dict[str, object]) -> None:
    model, batch = CrossAttended(), torch.randn(ROWS, WIDTH)
    ours = gact_fx.compile(copy.deepcopy(model), inner="eager", min_elements=64)
    trained(ours, batch)
    plan = gact_fx.inspect(ours).plan
    assert plan is not None and any(tensor.shared for g in plan.graphs for tensor in g.tensors)
    again = gact_fx.compile(copy.deepcopy(model), plan=plan, min_elements=64, **options)
    exact, found = trained(model, batch)[0], trained(again, batch)[0]
    assert error(found, exact) < 0.1
    assert not any(
        node.target is compress_once for g in gact_fx.inspect(again).graphs for node in g.forward.graph.nodes
    )


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


def test_graph_by_graph_nothing_is_shared() -> None:
    """``backend="gact"`` knows no forward pass of the model, and must not plan as if codes were stored once."""
    model, batch = CrossAttended(), torch.randn(ROWS, WIDTH)
    model.layers = nn.ModuleList([model.layers[0]] * 5)
    options = {"inner": "eager", "budget_bytes": 8_000, "min_elements": 64}
    ours = torch.compile(copy.deepcopy(model), backend="gact", options=options)
    _, held = trained(ours, batch)
    # Two graphs with a budget each.
    assert held <= 2 * 8_000


def test_a_graph_that_spends_less_than_eager_pytorch_needs_is_given_as_much() -> None:
    alone = graph(1e-6, 1.0, 1.0, 1.0)
    key = alone.analysis.saved[0].key
    shared = replace(alone, crossings={key: Crossing("x", 1, min_bits=4)})
    few = choose_plan([alone], Config(budget_bits=4.0), "m", None).graphs[0].entries()[key]
    enough = choose_plan([shared], Config(budget_bits=4.0), "m", None).graphs[0].entries()[key]
    assert few.bits is not None and few.bits < 4 and not few.shared
    assert enough.bits is not None and enough.bits >= 4 and enough.shared


def test_convolutions_share_codes_whatever_the_layout() -> None:
    model, batch = Convolutions(), torch.randn(4, 3, 20, 20).to(memory_format=torch.channels_last)
    exact, _ = trained(copy.deepcopy(model), batch)
    for inner in ("eager", "inductor"):
        ours = gact_fx.compile(copy.deepcopy(model), inner=inner, budget_bits=8, min_elements=64)
        assert error(trained(ours, batch)[0], exact) < 0.02, inner


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_view_that_a_graph_saves_and_returns_is_stored_once(inner: str, caplog: pytest.LogCaptureFixture) -> None:
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
    assert any("stored once" in row.reason for row in report.rows)


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


@pytest.mark.parametrize("how", ["a weight each", "one layer", "one weight in graphs of its own"])
def test_the_gradient_error_is_that_which_is_predicted(how: str) -> None:
    """One error, made once, reaches one weight's gradient several times over where that is shared."""
    model, batches = CrossAttended(), [torch.randn(ROWS, WIDTH) for _ in range(2)]
    if how == "one layer":
        model.layers = nn.ModuleList([model.layers[0]] * 5)
    elif how == "one weight in graphs of its own":
        linear = model.layers[0].linear
        model.layers = nn.ModuleList(Layer(linear, after) for after in (torch.sin, torch.cos, torch.tanh, torch.erf))
    ours = gact_fx.compile(
        model, inner="eager", budget_bits=3, min_elements=64, sample_batches=batches, loss_fn=lambda m, x: squares(m(x))
    )
    found = gact_fx.measure_gradient_error(ours, batches, lambda m, x: squares(m(x)), draws=32)
    assert 0.7 < found.total.variance / found.predicted_variance < 1.4


def squares(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean()


# The operator, and where its codes are kept


@pytest.fixture
def shared() -> SharedCodes:
    return SharedCodes(Storages())


def test_codes_are_made_once_and_are_those_of_compress(shared: SharedCodes) -> None:
    x = torch.randn(ROWS, WIDTH)
    alone = compress_once(x, *CODEC)
    with shared.active():
        first, second = compress_once(x, *CODEC), compress_once(x.detach(), *CODEC)
    assert first.data_ptr() == second.data_ptr() != alone.data_ptr()
    assert torch.equal(first, alone)
    assert torch.equal(first, torch.ops.gact_fx.compress.default(x, 4, 256, 1, None, "dither"))
    assert alone.numel() == blob_nbytes(NUMEL, torch.float32, 4, 256)
    assert compress_once(x, *CODEC).data_ptr() != first.data_ptr()


def test_codes_are_those_of_views_that_lie_in_the_same_order(shared: SharedCodes) -> None:
    x = torch.randn(ROWS, WIDTH)
    with shared.active():
        first = compress_once(x, *CODEC)
        view = compress_once(x.view(4, -1, WIDTH), *CODEC[:3], [0, 1, 2], CODEC[4])
        assert view.data_ptr() == first.data_ptr()


def test_codes_are_not_held(shared: SharedCodes) -> None:
    x = torch.randn(ROWS, WIDTH)
    with shared.active():
        blob = compress_once(x, *CODEC)
        storage = StorageWeakRef(blob.untyped_storage())
        del blob
        assert storage.expired()
        assert torch.equal(compress_once(x, *CODEC), compress_once(x.clone(), *CODEC))


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "written to in place": lambda x: x.mul_(2),
    "turned around": lambda x: x.t(),
    "another part of its memory": lambda x: x[:, 1:],
    "the rows of another": lambda x: x[1:],
    "read as another dtype": lambda x: x.view(torch.bfloat16),
}


@pytest.mark.parametrize("change", CHANGES)
def test_codes_of_another_tensor_are_others(shared: SharedCodes, change: str) -> None:
    x = torch.randn(ROWS, WIDTH)
    with shared.active():
        compress_once(x, *CODEC)
        other = CHANGES[change](x)
        found = compress_once(other, *CODEC)
    assert torch.equal(found, torch.ops.gact_fx.compress.default(other, 4, 256, 1, None, "dither"))


@pytest.mark.parametrize("other", [(5, *CODEC[1:]), (4, 128, *CODEC[2:]), (4, 256, 2, *CODEC[3:]),
                                   (*CODEC[:3], [1, 0], "dither"), (*CODEC[:4], "stochastic")])  # fmt: skip
def test_other_codes_of_a_tensor_are_others(shared: SharedCodes, other: tuple[object, ...]) -> None:
    x = torch.randn(ROWS, WIDTH)
    with shared.active():
        first, second = compress_once(x, *CODEC), compress_once(x, *other)
    assert torch.equal(second, compress_once(x, *other))
    assert first.data_ptr() != second.data_ptr()


def test_a_tensor_at_the_address_of_one_that_is_gone_is_another(shared: SharedCodes) -> None:
    memory = torch.randn(NUMEL)
    address = memory.numpy().data
    with shared.active():
        for value in (1.0, 2.0):
            # Both lie in memory that is not theirs, hence at one address, in storages of their own.
            x = torch.frombuffer(address, dtype=torch.float32).view(ROWS, WIDTH)
            memory.fill_(value)
            found = compress_once(x, *CODEC)
            assert torch.equal(found, torch.ops.gact_fx.compress.default(x, 4, 256, 1, None, "dither"))
            del x


def test_planning_counts_what_is_stored_once() -> None:
    first, second = (replace(graph(1.0, 10.0), fingerprint=name) for name in ("first", "second"))
    second = replace(second, runs=6)
    key = first.analysis.saved[0].key
    crosses = {key: Crossing("x", 1)}
    eight = blob_nbytes(NUMEL, torch.float32, 8, 256)
    # The tensors that do not cross, one and six times, and the one that does, once instead of seven times.
    config = Config(budget_bytes=8 * eight, group_size=256, rounding="stochastic")
    apart = choose_plan([first, second], config, "m", None)
    once = choose_plan([replace(first, crossings=crosses), replace(second, crossings=crosses)], config, "m", None)
    assert all(bits == 8 for bits, *_ in once.choices().values())
    assert any(bits is not None and bits < 8 for bits, *_ in apart.choices().values())
    codes = [g.entries()[key] for g in once.graphs]
    assert all(code.shared for code in codes) and len({code.seed for code in codes}) == 1
    # Every run adds its variance.
    assert once.variance == pytest.approx(7 * 11 * step_variance(8))
