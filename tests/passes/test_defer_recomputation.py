from dataclasses import replace
from typing import Any

import torch
from conftest import Trace, analyze, insert, run_pass
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from gact_fx.codec.code import Code
from gact_fx.graphs.live_memory import peak_nbytes
from gact_fx.plan import GraphPlan, TensorPlan

aten = torch.ops.aten
decompress = torch.ops.gact_fx.decompress.default


class Residual(nn.Module):
    """Blocks whose inputs are sums over all earlier blocks: a chain that recomputation would rebuild from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().sum()


def most_values_alive(module: fx.GraphModule) -> int:
    """The largest number of decompressed elements that backward holds at one time."""
    alive: dict[fx.Node, int] = {}
    most = 0
    for node in module.graph.nodes:
        if node.target is decompress:
            alive[node] = node.meta["val"].numel()
        most = max(most, sum(alive.values()))
        alive = {n: size for n, size in alive.items() if max(n.users) is not node}
    return most


def test_values_are_decompressed_right_before_they_are_used(trace: Trace) -> None:
    pair = trace(Residual(), torch.randn(64, 32), recompute="auto", inner="inductor")
    analysis = analyze(pair)
    tensors = tuple(TensorPlan(t.key, Code(8, seed=1)) for t, _ in analysis.quantized())
    insert(pair, analysis, GraphPlan("", tensors))
    before = [node.name for node in pair.backward.graph.nodes]
    run_pass("defer_recomputation", pair)
    nodes = list(pair.backward.graph.nodes)
    assert sorted(before) == sorted(node.name for node in nodes)
    place = {node: i for i, node in enumerate(nodes)}
    for node in pair.backward.graph.find_nodes(op="call_function", target=decompress):
        # Nothing stands between but what else the first reader waits for.
        reader = min(node.users)
        between = nodes[place[node] + 1 : place[reader]]
        assert not any(n.target is torch.ops.aten.mm.default for n in between), node
    largest = max(t.numel for t, _ in analysis.quantized())
    assert most_values_alive(pair.backward) <= 4 * largest


def test_it_changes_no_value(trace: Trace) -> None:
    model, x = Residual(), torch.randn(64, 32)
    pair = trace(model, x, recompute="auto")
    inputs = [
        torch.randn(n.meta["val"].shape, generator=torch.Generator().manual_seed(i))
        for i, n in enumerate(pair.backward.graph.find_nodes(op="placeholder"))
    ]
    before = fx.Interpreter(pair.backward).run(*inputs)
    run_pass("defer_recomputation", pair)
    for a, b in zip(fx.Interpreter(pair.backward).run(*inputs), before, strict=True):
        assert a is b is None or torch.equal(a, b)


class Gate(nn.Module):
    """Backward multiplies by a saved value and by what takes much memory to compute of another."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.sin() * torch.nn.functional.gelu(y)).sum()


def test_what_takes_most_memory_is_computed_first(trace: Trace) -> None:
    x, y = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    pair = trace(Gate(), x, y)
    run_pass("defer_recomputation", pair)
    order = [node for node in pair.backward.graph.nodes if node.op == "call_function"]
    graph = pair.backward.graph
    peak = peak_nbytes(graph, graph.find_nodes(op="placeholder"), fused=False)
    for node in order:
        # Any two neighbours that do not read each other the other way round take no less.
        following = node.next
        if following.op == "call_function" and node not in following.all_input_nodes:
            following.append(node)
            assert peak_nbytes(graph, graph.find_nodes(op="placeholder"), fused=False) >= peak
            following.prepend(node)


def test_what_others_read_does_not_count(trace: Trace) -> None:
    w, x, y = (torch.randn(64, 64, depth, requires_grad=True) for depth in (16, 8, 1))
    pair = trace(lambda w, x, y: (w * w).sum() + (x * x).sum() + y.sum(), w, x, y)
    graph = fx.Graph()
    tangent = next(iter(pair.tangents()))
    mode = FakeTensorMode()
    given = [graph.placeholder(name) for name in ("w", "x", tangent)]
    for node, depth in zip(given, (16, 8, 1), strict=True):
        node.meta["val"] = mode.from_tensor(torch.randn(64, 64, depth))

    def call(target: torch._ops.OpOverload, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        with mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    def squares(of: fx.Node) -> fx.Node:
        return call(aten.sum.dim_IntList, call(aten.mul.Tensor, of, of), [2], True)

    # Of much memory to compute, but there already when the product of both sums' functions is computed, and longer.
    shared = squares(given[0])
    early = call(aten.mul.Tensor, given[2], shared)
    small, large = call(aten.exp.default, shared), squares(given[1])
    product = call(aten.mul.Tensor, early, call(aten.mul.Tensor, small, large))
    graph.output((call(aten.mul.Tensor, product, shared),))
    run_pass("defer_recomputation", replace(pair, backward=fx.GraphModule({}, graph)))
    names = [node.name for node in graph.nodes]
    assert names.index(large.name) < names.index(small.name)
