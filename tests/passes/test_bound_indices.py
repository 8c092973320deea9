"""Bounds of indices against the indices that operators return, and the packed indices against the exact ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Trace, analyze, insert
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import gact_fx
from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.interpreter import GraphInterpreter
from gact_fx.passes.bound_indices import IndexRange, index_limit, index_range
from gact_fx.passes.encodings import Pack
from gact_fx.plan import GraphPlan, TensorPlan

aten = torch.ops.aten
MATRIX, IMAGE, VOLUME = (37, 21), (5, 3, 12, 10), (2, 3, 6, 8, 4)
SAMPLES = {2: torch.rand(5, 3, 2), 3: torch.rand(2, 3, 3)}

# name -> (shape, function of x that returns indices, limit)
INDICES: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], Any], int]] = {
    "argmax": (MATRIX, lambda x: x.argmax(1), 21),
    "argmax dim 0": (MATRIX, lambda x: x.argmax(0), 37),
    "argmax keepdim": (MATRIX, lambda x: x.argmax(-2, keepdim=True), 37),
    "argmax of all": (MATRIX, lambda x: x.argmax(), 37 * 21),
    "argmin": (MATRIX, lambda x: x.argmin(-1), 21),
    "argmin by keyword": (MATRIX, lambda x: aten.argmin(x, dim=0), 37),
    "argsort": (MATRIX, lambda x: aten.argsort(x), 21),
    "max": (MATRIX, lambda x: x.max(0)[1], 37),
    "min keepdim": (MATRIX, lambda x: x.min(1, keepdim=True)[1], 21),
    "median": (MATRIX, lambda x: x.median(0)[1], 37),
    "mode": (MATRIX, lambda x: x.mode()[1], 21),
    "sort": (MATRIX, lambda x: x.sort()[1], 21),
    "sort dim 0": (MATRIX, lambda x: x.sort(0, descending=True)[1], 37),
    "topk": (MATRIX, lambda x: x.topk(5)[1], 21),
    "topk dim 0": (MATRIX, lambda x: x.topk(5, dim=0)[1], 37),
    "kthvalue": (MATRIX, lambda x: x.kthvalue(7, 0)[1], 37),
    "cummax": (MATRIX, lambda x: x.cummax(0)[1], 37),
    "cummin": (MATRIX, lambda x: x.cummin(-1)[1], 21),
    "max_pool2d": (IMAGE, lambda x: aten.max_pool2d_with_indices(x, [2, 2])[1], 120),
    "max_pool2d of one": (IMAGE[1:], lambda x: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])[1], 120),
    "max_pool3d": (VOLUME, lambda x: aten.max_pool3d_with_indices(x, [2, 2, 2])[1], 6 * 8 * 4),
    "adaptive_max_pool2d": (IMAGE, lambda x: aten.adaptive_max_pool2d(x, [4, 3])[1], 120),
    "adaptive_max_pool3d": (VOLUME, lambda x: aten.adaptive_max_pool3d(x, [2, 2, 2])[1], 6 * 8 * 4),
    "fractional_max_pool2d": (IMAGE, lambda x: aten.fractional_max_pool2d(x, [2, 2], [5, 5], SAMPLES[2])[1], 120),
}


@pytest.mark.parametrize("name", INDICES)
def test_limits_hold_and_are_tight(name: str) -> None:
    shape, function, limit = INDICES[name]
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.randn(shape)).graph
    (node,) = graph.output_node().all_input_nodes
    assert index_limit(node) == limit
    drawn = [function(torch.randn(shape)) for _ in range(300)]
    assert min(int(d.min()) for d in drawn) >= 0
    largest = max(int(d.max()) for d in drawn)
    # Pools may ignore a remainder, and the last of very many is seldom the largest of all.
    assert limit * 3 // 4 <= largest < limit
    if name.startswith(("argmax dim", "sort", "topk", "max")) and "pool" not in name:
        assert largest == limit - 1


def test_the_values_beside_indices_are_not_bounded() -> None:
    graph = make_fx(lambda x: x.sort()[0], tracing_mode="fake")(torch.randn(MATRIX)).graph
    (node,) = graph.output_node().all_input_nodes
    assert index_limit(node) is None


@pytest.mark.parametrize("name", ["argmax", "argmax of all", "sort", "max_pool2d"])
def test_sizes_that_vary_bound_nothing(name: str) -> None:
    shape, function, _ = INDICES[name]
    graph = make_fx(function, tracing_mode="symbolic")(torch.randn(shape)).graph
    node = next(node for node in graph.output_node().all_input_nodes)
    assert index_limit(node) is None


def pooled(inner: str, trace: Trace) -> tuple[GraphPair, list[torch.Tensor], list[Any]]:
    """The pair of a model with a max-pool, inputs for it, and the gradients before any rewriting."""
    conv = nn.Conv2d(3, 8, 3, padding=1)
    x = torch.randn(4, 3, 16, 16)
    pair = trace(lambda x: F.max_pool2d(conv(x).tanh(), 2).square().sum(), x, inner=inner, recompute="auto")
    tensors = {tuple(t.shape): t.detach() for t in (x, conv.weight, conv.bias)}  # type: ignore[union-attr]
    inputs = [tensors[tuple(slot.meta["val"].shape)] for slot in pair.forward.graph.find_nodes(op="placeholder")]
    return pair, inputs, run(pair, inputs)


def run(pair: GraphPair, inputs: list[torch.Tensor]) -> list[Any]:
    outputs = GraphInterpreter(pair.forward).run(*inputs)
    users, saved = outputs[: pair.num_user_outputs], outputs[pair.num_user_outputs :]
    return list(GraphInterpreter(pair.backward).run(*saved, torch.ones_like(users[-1])))


# Inductor saves offsets within a window, PyTorch positions in the plane.
@pytest.mark.parametrize(
    ("inner", "dtype", "bits"), [("inductor", torch.int8, 2), ("eager", torch.int64, 8)], ids=["inductor", "eager"]
)
def test_packed_indices_are_exact(trace: Trace, inner: str, dtype: torch.dtype, bits: int) -> None:
    pair, inputs, wanted = pooled(inner, trace)
    analysis = analyze(pair)
    (found,) = [(t, how) for t, how in analysis.pairs() if isinstance(how, Pack)]
    assert (found[0].dtype, found[1].width) == (dtype, bits)
    # Everything else stays as it is.
    entries = tuple(TensorPlan(t.key, None) for t, _ in analysis.quantized())
    insert(pair, analysis, GraphPlan("", entries))
    (blob,) = [value.source for value in pair.saved_values() if value.source.meta["val"].dtype is torch.uint8]
    assert blob.meta["val"].numel() <= found[0].numel * bits // 8 + 64
    for a, b in zip(run(pair, inputs), wanted, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


POSITIONS = torch.randint(0, 37, (2, 50))
# name -> (function of x and of positions, what the positions are known to lie in)
USES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], IndexRange | None]] = {
    "index_select": (lambda x, i: x.index_select(0, i[0]) + x.index_select(0, i[1]), IndexRange(37)),
    "one row alone": (lambda x, i: x.index_select(0, i[0]), None),
    "gather": (lambda x, i: x.gather(0, i.view(5, 20)), IndexRange(37)),
    "scatter": (lambda x, i: x[:2].sum() + torch.zeros(2, 40).scatter_add(1, i, x.flatten()[:100].view(2, 50)),
                IndexRange(40)),
    "index": (lambda x, i: x[i.flatten()], IndexRange(37, wraps=True)),
    "index and comparison": (lambda x, i: x[i] * (i > 0)[..., None], None),
    "index_select and comparison": (lambda x, i: x.index_select(0, i.flatten()) * (i > 0).view(-1, 1), IndexRange(37)),
    "index of two sizes": (lambda x, i: x[i].sum() + x.T[i].sum(), None),
    "index and index_select": (lambda x, i: x[i[0]] + x.index_select(0, i[1]), IndexRange(37, wraps=True)),
    "after cat": (lambda x, i: x.index_select(0, torch.cat([i.flatten(), i.flatten()])), IndexRange(37)),
    "arithmetic": (lambda x, i: x.index_select(0, i.flatten() // 2), None),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_positions_are_bounded_by_what_they_index(name: str) -> None:
    function, expected = USES[name]
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.randn(MATRIX), POSITIONS).graph
    assert index_range(graph.find_nodes(op="placeholder")[1]) == expected


@pytest.mark.parametrize("inner", ["inductor", "eager"])
def test_positions_from_the_end_are_packed(inner: str) -> None:
    """What an earlier graph made for this one alone is packed; -1 must still be the last row."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(37, 32))

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            shifted = i - 20
            torch._dynamo.graph_break()
            return (self.weight.tanh()[shifted] * torch.linspace(0, 1, len(i))[:, None]).sum()

    i, model = torch.arange(5000) % 37, Rows()
    model(i).backward()
    exact, model.weight.grad = model.weight.grad, None
    gact_fx.compile(model, inner=inner, budget_bits=8, sample_batches=[(i,)])
    model(i).backward()
    (row,) = [row for row in gact_fx.inspect(model).rows if row.encoding == "pack"]
    assert (row.bits, row.bytes_before) == (6, 8 * 5000) and row.bytes_after < 8 * 5000 / 9
    assert model.weight.grad is not None and exact is not None
    assert float((model.weight.grad - exact).norm() / exact.norm()) < 0.01


def test_rows_that_vary_in_number_are_no_bound() -> None:
    """Sizes that are symbols have no hash."""
    graph = make_fx(lambda x, i: x[i + 0], tracing_mode="symbolic")(torch.rand(50, 16), torch.arange(40)).graph
    (node,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert index_range(node) is None


def test_a_mask_beside_positions_shifts_their_dimension() -> None:
    """``x[mask, i]`` with a mask of two dimensions indexes the third by ``i``."""

    def put(x: torch.Tensor, mask: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return aten.index_put(x, [mask, i + 0], torch.zeros(()))

    arguments = torch.rand(4, 8, 64), torch.ones(4, 8, dtype=torch.bool), torch.arange(32)
    graph = make_fx(put, tracing_mode="fake")(*arguments).graph
    (node,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert index_range(node) is None
