"""Spelled out, an activation gives the same numbers, and an unbiased gradient when its input was rounded."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Trace, analyze, gradients, insert, relative_error, run_pass
from torch import fx, nn
from torch.nn import functional as F

import gact_fx
from gact_fx.codec.code import Code
from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.interpreter import GraphInterpreter
from gact_fx.plan import GraphPlan, TensorPlan

INNER = pytest.mark.parametrize("inner", ["inductor", "eager"])
Function = Callable[[torch.Tensor], torch.Tensor]
INFINITY, NAN = float("inf"), float("nan")
EDGES = torch.tensor([0.0, -0.0, NAN, INFINITY, -INFINITY, 1.0, -1.0, 6.0, 1e-45, -1e-45])


def run(pair: GraphPair, inputs: list[Any]) -> list[Any]:
    outputs = GraphInterpreter(pair.forward).run(*inputs)
    users, saved = outputs[: pair.num_user_outputs], outputs[pair.num_user_outputs :]
    return list(GraphInterpreter(pair.backward).run(*saved, torch.ones_like(users[-1])))


def operators(graph: fx.GraphModule) -> set[str]:
    return {str(node.target).split(".")[1] for node in graph.graph.nodes if "." in str(node.target)}


SPELLED: dict[str, Function] = {
    "relu": torch.relu,
    "relu6": F.relu6,
    "clamp": lambda y: y.clamp(-1, 1),
    "clamp one-sided": lambda y: y.clamp(max=0.5),
    "clamp equal bounds": lambda y: y.clamp(0.5, 0.5),
    "clamp crossing bounds": lambda y: y.clamp(1.0, -1.0),
    "clamp_min": lambda y: y.clamp_min(0.25),
    "clamp_max": lambda y: y.clamp_max(1.0),
    "abs": torch.abs,
    "maximum": lambda y: torch.maximum(y, y.flip(0)),
    "minimum": lambda y: torch.minimum(y, y.flip(0)),
    "hardtanh": F.hardtanh,
    "leaky_relu": lambda y: F.leaky_relu(y, 0.1),
}


@INNER
@pytest.mark.parametrize("name", SPELLED)
@pytest.mark.parametrize("edges", [False, True], ids=["random", "edges"])
def test_the_gradients_are_the_same(trace: Trace, inner: str, name: str, edges: bool) -> None:
    p = nn.Parameter(torch.ones(1))
    # The sine's derivative has y saved, from which the activation is computed again.
    function = lambda x: (SPELLED[name](x * p) * (x * p).sin()).sum()  # noqa: E731
    x = torch.cartesian_prod(EDGES, EDGES) if edges else torch.randn(64, 4)
    pair = trace(function, x, inner=inner, recompute="auto")
    again = replace(pair, backward=fx.GraphModule(pair.backward, copy.deepcopy(pair.backward.graph)))
    arguments = [x if slot.meta["val"].shape == x.shape else p.detach() for slot in placeholders(pair)]
    wanted = run(pair, arguments)
    run_pass("expose_decisions", again)
    found = run(again, arguments)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    hidden = {"relu", "hardtanh", "clamp_min", "clamp_max", "abs", "maximum", "minimum", "clamp", "leaky_relu"}
    assert not hidden & operators(again.backward) or name == "clamp crossing bounds"


def placeholders(pair: GraphPair) -> list[fx.Node]:
    return pair.forward.graph.find_nodes(op="placeholder")


def test_every_value_is_the_same_on_edges(trace: Trace) -> None:
    """One element at a time: in the gradient of a sum NaN hides everything else."""
    x, y = torch.cartesian_prod(EDGES, EDGES).t().clone()
    for name, function in SPELLED.items():
        values = torch.stack([x, y]) if name in ("maximum", "minimum") else x
        pair = handmade(function, values)
        (wanted,) = pair.backward(values, torch.ones_like(values))
        run_pass("expose_decisions", pair)
        (found,) = pair.backward(values, torch.ones_like(values))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")  # type: ignore[misc]


def handmade(function: Function, x: torch.Tensor) -> GraphPair:
    """A pair whose backward multiplies ``function(x)`` with the tangent."""
    from torch.fx.experimental.proxy_tensor import make_fx

    forward = make_fx(lambda x: (x.sum(), x), tracing_mode="fake")(x)
    backward = make_fx(lambda x, tangent: (function(x) * tangent,), tracing_mode="fake")(x, torch.ones_like(x))
    return GraphPair(forward, backward, 1, frozenset(), frozenset())


def test_integers_are_left_alone() -> None:
    x = torch.arange(-3, 4)
    pair = handmade(lambda x: x.clamp(-1, 2), x)
    before = pair.backward.code
    run_pass("expose_decisions", pair)
    assert pair.backward.code == before


@pytest.mark.parametrize(
    "function",
    [
        lambda n: n.clamp(min=0.5),
        lambda n: n.clamp_max(2.5),
        lambda n: torch.clamp_min(n, 0.5),
        lambda n: n.clamp(0.5, 2.5),
    ],
)
def test_integers_that_a_bound_makes_floats_are_left_alone(function: Function) -> None:
    """Written in the dtype of the integers, bounds of 0.5 and 2.5 would be 0 and 2."""
    x = torch.arange(-3, 4)
    pair = handmade(function, x)
    (expected,) = pair.backward(x, torch.ones(7))
    run_pass("expose_decisions", pair)
    pair.backward.recompile()
    assert torch.equal(pair.backward(x, torch.ones(7))[0], expected)


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_bounds_may_be_sizes_that_vary(inner: str) -> None:
    """Positions in a sequence, whose decisions are exact: the bias has a gradient where no bound counts."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            length = x.shape[1]
            at = (self.layer(x) * length).clamp(2, length - 1).clamp(max=0.9 * length)
            return (at * at.sin()).sum()

    model = Positions()
    oracle = copy.deepcopy(model)
    gact_fx.compile(model, budget_bits=8, inner=inner, min_elements=64)
    for length in (32, 40, 28, 36):
        x = torch.randn(16, length, 16)
        model(x).backward(), oracle(x).backward()
        assert relative_error(gradients(model), gradients(oracle)) < 0.05


def test_what_depends_on_tangents_is_left_alone() -> None:
    pair = handmade(lambda x: x, torch.randn(4))
    graph = pair.backward.graph
    (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    with graph.inserting_after(product):
        clipped = graph.call_function(torch.ops.aten.relu.default, (product,))
    clipped.meta["val"] = product.meta["val"]
    graph.output_node().args = ((clipped,),)
    run_pass("expose_decisions", pair)
    assert graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)


_NOISE = torch.Generator().manual_seed(0)
U, V, W = (nn.Parameter(torch.randn(shape, generator=_NOISE)) for shape in ((64, 4), (16, 64), (64, 8)))


def of_what_is_saved(x: torch.Tensor, activation: Function = torch.relu) -> torch.Tensor:
    """y is saved for U's gradient, and W's reads activation(y)."""
    y = x @ V
    return (activation(y) @ W).sum() + (y @ U).sum()


@INNER
def test_relu_and_its_derivative_share_one_mask(trace: Trace, inner: str) -> None:
    pair = trace(of_what_is_saved, torch.randn(64, 16), inner=inner, recompute="auto")
    assert "relu" in operators(pair.backward)
    analysis = analyze(pair)
    (how,) = [how for _, how in analysis.quantized()]
    assert len(how.masks) == 1 and how.mask_numel == 64 * 64


def by_seed(pair: GraphPair, inputs: list[torch.Tensor], seeds: int) -> Iterator[list[Any]]:
    """The gradients of the rewritten ``pair``, with other seeds in its compress and decompress."""
    places = ((torch.ops.gact_fx.compress.default, 3, pair.forward), (torch.ops.gact_fx.decompress.default, 5,
              pair.backward))  # fmt: skip
    for seed in range(seeds):
        for target, position, module in places:
            for node in module.graph.find_nodes(op="call_function", target=target):
                node.update_arg(position, seed)
        yield run(pair, inputs)


PIECEWISE_LINEAR: dict[str, Function] = {
    **{name: SPELLED[name] for name in ("relu", "relu6", "clamp", "abs", "hardtanh", "leaky_relu")},
    "hardsigmoid": F.hardsigmoid,
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "threshold": lambda y: F.threshold(y, 0.5, 0.0),
    "prelu": lambda y: F.prelu(y, torch.tensor([0.25])),
}
# Softshrink takes the sign of what is rounded. A plan weighs what is measured of that bias (`bent_networks`); exact
# signs beside the codes would leave a gradient of as many bytes twice as far off.
MOST_BIAS = {"softshrink": 0.25}  # of the deviation


@pytest.mark.slow
@pytest.mark.parametrize("name", PIECEWISE_LINEAR)
@INNER
def test_recomputed_from_rounded_values_it_is_unbiased(trace: Trace, inner: str, name: str) -> None:
    """2 bits: relu(Q(y)), the mean of which is not relu(y), is off by many standard errors."""
    torch.manual_seed(0)
    x, seeds = torch.randn(64, 16), 256
    activation = PIECEWISE_LINEAR[name]
    pair = trace(lambda x: of_what_is_saved(x, activation), x, inner=inner, recompute="auto")
    analysis = analyze(pair)
    entries = tuple(TensorPlan(t.key, Code(2, seed=0)) for t, _ in analysis.quantized())
    insert(pair, analysis, GraphPlan("", entries))
    tensors = {tuple(t.shape): t.detach() for t in (x, U, V, W)}
    inputs = [tensors[tuple(slot.meta["val"].shape)] for slot in placeholders(pair)]
    exact = torch.autograd.grad(of_what_is_saved(x, activation), [W])[0]
    draws = torch.stack(
        [next(g for g in found if g is not None and g.shape == W.shape) for found in by_seed(pair, inputs, seeds)]
    ).double()
    error = (draws.mean(0) - exact).square().sum().sqrt()
    known = MOST_BIAS.get(name, 0.0)
    assert not known or any(how.bends for _, how in analysis.quantized())
    assert error <= (3 * seeds**-0.5 + known) * draws.var(0).sum().sqrt()


class ReturnsRelus(nn.Module):
    """What a ReLU returned is read by another ReLU, and is returned: its own derivative may come first in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(a, 8, 3, padding=1) for a in (3, 8))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(self.norms[0](self.convs[0](x)))
        z = torch.relu(self.norms[1](self.convs[1](y)) + y)
        return y, torch.relu(z)


@pytest.mark.parametrize("inner", ["inductor", "eager"])
def test_relus_that_are_returned(inner: str) -> None:
    torch.manual_seed(0)
    model, x = ReturnsRelus(), torch.randn(4, 3, 16, 16)
    reference = copy.deepcopy(model)
    gact_fx.compile(model, inner=inner, budget_bits=8, min_elements=64)
    for _ in range(2):
        found: list[torch.Tensor] = []
        exact: list[torch.Tensor] = []
        for network, into in ((model, found), (reference, exact)):
            y, z = network(x)
            (y.square().mean() + z.square().mean()).backward()
            into += gradients(network)
    assert relative_error(found, exact) < 0.01
