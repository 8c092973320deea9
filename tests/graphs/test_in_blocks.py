"""Block by block pointwise operators give what they give at once, in less memory."""

import importlib
from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from gact_fx.graphs.blocks import BLOCK_NUMEL, LEAST_NBYTES, Blocks, Rows
from gact_fx.graphs.compilers import interpret_graph, interpret_in_blocks
from gact_fx.graphs.compute_again import compute_again
from gact_fx.graphs.in_blocks import in_blocks

aten = torch.ops.aten
SHAPE = (4, 64, 32, 64)
NBYTES = 4 * 64 * 32 * 64 * 4
assert NBYTES > LEAST_NBYTES

X, ROW = torch.randn(SHAPE), torch.rand(1, 64, 1, 1)
FUNCTIONS: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "chain": (lambda x: [x.exp().sigmoid().tanh()], [X]),
    "broadcast": (lambda x, row: [(x * row + 1).sigmoid() * x], [X, ROW]),
    "two results of two dtypes": (lambda x: [y := x.exp() + 1, (y > 2).to(torch.float64)], [X]),
    "what is broadcast alone": (lambda x, row: [(row.expand(SHAPE) + 1).exp(), x.exp()], [X, ROW]),
    "a sum in between": (lambda x: [(y := x.exp().sin()) * y.sum(1, keepdim=True) + y], [X]),
    "channels last": (lambda x: [x.exp().sigmoid()], [X.to(memory_format=torch.channels_last)]),
    "few channels last": (
        lambda x: [x.exp().sigmoid()], [torch.randn(8, 16, 64, 64).to(memory_format=torch.channels_last)],
    ),
    "transposed": (lambda x: [x.transpose(1, 3).exp().sigmoid()], [X]),
    "two layouts": (lambda x, y: [(x + y).sigmoid()], [X, X.to(memory_format=torch.channels_last)]),
    "few rows": (lambda x: [x.exp().sin()], [torch.randn(3, 5, 200_000)]),
    "a vector's worth": (lambda x: [x.exp().sin()], [torch.randn(1, 400_000)]),
    "sums": (lambda x: [(y := x.exp()).sum([0, 2]), (y * x).sum([0, 2], True), y.sin().sum([-1])], [X]),
    "sums that are read": (lambda x: [((y := x.exp().sin()) - y.sum([0], True)) * y.sum([1], True)], [X]),
    "a sum of two that begin apart": (
        lambda x, z: [(y := x.exp().sin()).sum([0]), (z.cos().sin() * y).sum([0, 2, 3])], [X, 2 * X],
    ),
    "a cast that is read behind a sum": (lambda x: [((y := x.double() + 1) - y.sum([0, 2, 3], True)).float()], [X]),
    "read in between": (lambda x: [(y := x.exp()).sin(), y.mean(), (y * 2).cos()], [X]),
}  # fmt: skip


def graph_of(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    found = make_fx(function, tracing_mode="fake")(*inputs)
    found.graph.eliminate_dead_code()
    return found


def blocks_of(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in in_blocks(graph, lambda body: body).graph.nodes if isinstance(node.target, Blocks)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_results_are_the_same(name: str) -> None:
    function, inputs = FUNCTIONS[name]
    graph, before = graph_of(function, *inputs), [x.clone() for x in inputs]
    assert blocks_of(graph)
    with torch.no_grad():
        expected, found = (run(graph)(list(inputs)) for run in (interpret_graph, interpret_in_blocks))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, check_stride=True)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def peak(run: Callable[[list[Any]], Any], inputs: list[torch.Tensor]) -> int:
    """The most bytes beyond the inputs at a time."""
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run(inputs)
    live = most = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


def test_what_is_made_on_the_way_is_as_large_as_a_block() -> None:
    """Of six tensors there is the result, where in whole tensors there are three at a time."""
    graph = graph_of(lambda x: [(x * (s := x.sigmoid())) * (1 + x * (1 - s))], X)
    assert peak(interpret_graph(graph), [X]) > 2.9 * NBYTES
    assert peak(interpret_in_blocks(graph), [X]) < 1.5 * NBYTES


def test_codes_are_written_in_between() -> None:
    """What is half as large as what it is made of splits no chain that does not read it."""

    def chain(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        wide = x.double() * 2
        codes = torch.cat([y.to(torch.uint8)])
        return [codes, (wide.sin() + 1).float()]

    y = torch.randn(SHAPE)
    assert peak(interpret_in_blocks(graph_of(chain, X, y)), [X, y]) < 2 * NBYTES


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_pool_runs_some_rows_at_a_time(memory_format: torch.memory_format) -> None:
    importlib.import_module("torch._inductor.inductor_prims")
    prims, window = torch.ops.prims, ([3, 3], [2, 2], [1, 1], [1, 1])
    x = torch.randn(13, 64, 40, 36).to(memory_format=memory_format)
    pool, places = (
        prims._low_memory_max_pool_with_offsets.default,
        prims._low_memory_max_pool_offsets_to_indices.default,
    )
    assert x.numel() > 2 * BLOCK_NUMEL
    with torch.no_grad():
        (whole, offsets), (found, where) = pool(x, *window, False), Rows(pool)(x, *window, False)
        size = window[0], [40, 36], *window[1:]
        for a, b in ((whole, found), (offsets, where), (places(offsets, *size), Rows(places)(offsets, *size))):
            assert a.equal(b) and a.stride() == b.stride() and a.dtype == b.dtype


def test_large_tensors_have_smaller_blocks() -> None:
    """Beside the result there are five blocks at a time, each a thirty-second of it."""
    x = torch.randn(64, 2**18)
    graph = graph_of(lambda x: [(x * (s := x.sigmoid())) * (1 + x * (1 - s))], x)
    assert peak(interpret_in_blocks(graph), [x]) < (1 + 6 / 32) * x.nbytes


def test_a_cast_is_computed_again_behind_a_sum() -> None:
    """There is the result, and nothing of 64 bits: neither for the sums, nor between these and what reads them."""

    def centred(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.double()
        sums = y.sum([0, 2], True), (y * y).sum([0, 2], True)
        return [(y - sums[0] - sums[1]).float()]

    graph = graph_of(centred, X)
    assert peak(interpret_graph(graph), [X]) > 3.9 * NBYTES
    assert peak(interpret_in_blocks(graph), [X]) < 1.5 * NBYTES


def test_a_cast_is_computed_again_behind_a_product_that_does_not_read_it() -> None:
    def around(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        wide = x.double()
        total = wide.sum([0])
        product = y @ y
        return [total, product, (wide * 2).sum([0])]

    graph = graph_of(around, X, torch.eye(64))
    assert peak(interpret_graph(graph), [X, torch.eye(64)]) > 2.9 * NBYTES
    assert peak(interpret_in_blocks(graph), [X, torch.eye(64)]) < 1.5 * NBYTES


def test_what_is_computed_again_reads_what_is_in_memory() -> None:
    """And no twin that was made for others before a product: that would have to wait for it in twice the bytes."""

    def chain(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        wide = x.float()
        total = wide.sum([0])
        first = y @ y
        narrow = (wide * 2).bfloat16()
        some = (narrow + 1).sum([0])
        second = y @ first
        return [total, some, second, (narrow + 2).sum([1])]

    graph = graph_of(chain, X.bfloat16(), torch.eye(64)).graph
    pointwise = {node for node in graph.nodes if node.target in (aten.mul.Tensor, aten.add.Tensor)}
    casts = {node for node in graph.nodes if "convert" in str(node.target) or "_to_copy" in str(node.target)}
    compute_again(graph, pointwise | casts)
    position = {node: at for at, node in enumerate(graph.nodes)}
    products = [position[node] for node in graph.nodes if node.target is aten.mm.default]
    for node in graph.nodes:
        is_read = node.op != "call_function" or node.users
        assert is_read or node.op == "output"
        if node.op == "call_function" and node.meta["val"].dtype is torch.float32 and node.meta["val"].dim() == 4:
            ends = [position[user] for user in node.users]
            assert not any(position[node] < at < max(ends) for at in products)


def test_what_would_keep_more_alive_is_not_computed_again() -> None:
    """Two sums of 64 bits each are one of 32 bits, which is what waits for its mean."""
    graph = graph_of(
        lambda a, b: [(y := (a.exp() @ a.exp() + b.exp() @ b.exp()).float()) - y.sum([0], True)],
        *[torch.randn(1024, 1024, dtype=torch.float64) for _ in range(2)],
    )
    compute_again(graph.graph, set(graph.graph.nodes))
    casts = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    assert len(casts) == 1


@pytest.mark.parametrize("is_last", [True, False])
def test_the_result_takes_the_place_of_what_nobody_reads_any_more(is_last: bool) -> None:
    graph = graph_of(lambda x: [(y := x @ x).exp().sigmoid(), x if is_last else y], torch.randn(1024, 1024))
    found = peak(interpret_in_blocks(graph), [torch.randn(1024, 1024)])
    assert found < (1.5 if is_last else 2.5) * 2**22
    assert is_last or found > 1.9 * 2**22


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x.exp(), x.mean()],  # one operator
        lambda x: [x.exp().t().contiguous().mean(1), x],  # nothing that follows it
        lambda x: [x.exp().mean().sin()],  # another shape
        lambda x: [torch.nn.functional.dropout(x, 0.5)],  # drawn numbers first
    ],
)
def test_what_is_left_alone(function: Callable[..., Any]) -> None:
    graph = graph_of(function, torch.randn(1024, 1024))
    assert all("rand" not in str(node.args) for node in blocks_of(graph)) and len(blocks_of(graph)) <= 1


def test_modes_see_every_operator() -> None:
    seen: list[Any] = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, tuple(args[0].shape)))
            return func(*args, **(kwargs or {}))

    graph = graph_of(lambda x: [x.exp().sigmoid()], X)
    run = interpret_in_blocks(graph)
    with torch.no_grad(), Seeing():  # type: ignore[no-untyped-call]
        run([X])
    assert [shape for func, shape in seen if func.name().startswith("aten::")] == [SHAPE] * 2


def test_what_aot_autograd_looks_at_runs_in_blocks() -> None:
    """It has a mode of its own in the first run of every graph."""

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    Look.__module__ = "torch._functorch._aot_autograd.runtime_wrappers"
    run = interpret_in_blocks(graph_of(lambda x: [x.exp().sigmoid().tanh()], X))

    def watched(inputs: list[Any]) -> Any:
        with Look():  # type: ignore[no-untyped-call]
            return run(inputs)

    assert peak(watched, [X]) < 1.5 * NBYTES


def test_two_results_of_one_call_are_memory_of_their_own() -> None:
    """One of them is read again behind the call that may write over the other."""
    graph = graph_of(lambda x: [(y := x.exp() + 1, z := x.sin() * y)[0].sigmoid().cos(), z.sum(), z.cos().sin()], X)
    nodes = in_blocks(graph, lambda body: body).graph.nodes
    assert any(node.target is getitem for node in nodes)
    with torch.no_grad():
        expected, found = (run(graph)([X]) for run in (interpret_graph, interpret_in_blocks))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
