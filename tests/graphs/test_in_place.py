"""Operators that write over what nobody reads after them give what they give elsewhere, and only write there."""

from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from gact_fx.graphs.compilers import interpret_graph
from gact_fx.graphs.in_place import InPlaceInterpreter, find_last_reads
from gact_fx.graphs.live_memory import lifetimes
from gact_fx.graphs.operators import writing_form
from gact_fx.graphs.replay import Replay
from gact_fx.graphs.trees import tree_leaves

aten = torch.ops.aten


def pointwise_operators() -> list[Any]:
    packets = [packet for name in dir(aten) if hasattr(packet := getattr(aten, name), "overloads")]
    found = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return [operator for operator in found if writing_form(operator) is not None]


def some_value(argument: Any) -> Any:
    if str(argument.type) == "Tensor":
        return torch.rand(4, 64) + 0.1
    return {"number": 2, "Scalar": 2, "int": 2, "float": 0.5, "bool": True}.get(str(argument.type))


def test_a_size_among_what_is_read_is_in_no_memory() -> None:
    """A mean's gradient is divided by a size that varies; of a graph's inputs nothing is written over."""

    def scaled(x: torch.Tensor, tall: torch.Tensor) -> torch.Tensor:
        return (x * 2) / tall.shape[0]

    graph = make_fx(scaled, tracing_mode="symbolic")(torch.rand(8, 4), torch.rand(5, 4))
    divided = next(node for node in graph.graph.nodes if node.target is aten.div.Tensor)
    assert [source.target for source in find_last_reads(graph.graph)[divided]] == [aten.mul.Tensor]


def test_every_pointwise_operator_may_write_where_it_reads() -> None:
    tried = 0
    for operator in pointwise_operators():
        arguments = operator._schema.arguments
        given = {a.name: some_value(a) for a in arguments if str(a.type) == "Tensor" or not a.has_default_value()}
        try:
            expected = operator(**given)
        except (RuntimeError, TypeError):
            continue  # it wants other arguments
        form = writing_form(operator)
        assert form is not None
        run, name = form
        for key in (key for key, value in given.items() if isinstance(value, torch.Tensor)):
            if expected.dtype == given[key].dtype and expected.shape == given[key].shape:
                copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
                found = run(**copies, **{name: copies[key]})
                assert found is copies[key] and torch.equal(found.nan_to_num(), expected.nan_to_num()), (operator, key)
                tried += 1
    assert tried > 150


def graph_of(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def written(graph: fx.Graph) -> set[str]:
    """The targets of nodes that write over something."""
    return {node.name for node in find_last_reads(graph)}


X = torch.rand(8, 8)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.exp().sigmoid().tanh(), {"sigmoid", "tanh"}),
        (lambda x: x.sigmoid(), set()),  # an input is the caller's
        (lambda x: [y := x.exp(), y.sigmoid()], set()),  # what is returned is read once more
        (lambda x: (y := x.exp()).sigmoid() + y, {"add"}),
        (lambda x: (y := x.exp()).t().sigmoid() + y.t(), {"add"}),  # a view of y is read later
        (lambda x: (y := x.exp())[0].sigmoid() + y.sum(), {"add"}),
        (lambda x: torch.mm(x, x).sigmoid(), {"sigmoid"}),
        (lambda x: torch.ops.prims.convert_element_type(x, torch.float64).sigmoid(), {"sigmoid"}),
        (lambda x: torch.ops.prims.convert_element_type(x, torch.float32).sigmoid(), set()),  # it may be x itself
        (lambda x: (y := x.exp()) - y[:1], set()),  # other elements read what would be written
    ],
)  # fmt: skip
def test_only_what_nobody_reads_any_more_is_written_over(function: Callable[..., Any], expected: set[str]) -> None:
    module, x = graph_of(function, X), X.clone()
    assert written(module.graph) == expected
    found = InPlaceInterpreter(module).run(x)
    assert torch.equal(x, X)
    for one, other in zip(tree_leaves(found), tree_leaves(function(X)), strict=True):
        assert torch.equal(one, other)


def test_the_memory_of_what_may_share_it_is_left_alone() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    parts = graph.call_function(aten.split.Tensor, (x, 4))
    first = graph.call_function(getitem, (parts, 0))
    kept = graph.call_function(torch.ops.gact_fx.behind.default, (first, x))
    graph.output(graph.call_function(aten.exp.default, (kept,)))
    assert not find_last_reads(graph)


def test_a_result_of_another_type_shape_or_layout_has_its_own_memory() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        row = x.sum(0).exp()
        return [row + x, x.exp() > 1, x.exp().t() + x]

    module = graph_of(function, X)
    for found, expected in zip(InPlaceInterpreter(module).run(X.clone()), function(X), strict=True):
        assert torch.equal(found, expected) and found.stride() == expected.stride()


def test_memory_is_as_low_as_it_is_said_to_be() -> None:
    """A chain of pointwise operators takes one tensor, whatever its length."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        for _ in range(5):
            y = (y * 0.5).sigmoid() + x
        return y.sum()

    module = graph_of(function, torch.rand(2**16))
    levels = lifetimes(module.graph, [], fused=False).levels()
    assert max(levels) - levels[0] <= 2**18 + 8
    x = torch.rand(2**16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        interpret_graph(module)([x])
    live, most = 0, 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    assert most < 1.1 * 2**18


def test_values_that_are_given_to_a_replay_stay_as_they_are() -> None:
    module = graph_of(lambda x: [x.exp().sigmoid() * 2.0], X)
    nodes = {node.name: node for node in module.graph.nodes}
    exp = next(name for name in nodes if name.startswith("exp"))
    given = {exp: X.clone()}
    (found,) = Replay(module, [X]).run(given)
    assert torch.equal(found, X.sigmoid() * 2.0) and torch.equal(given[exp], X)


def test_what_a_mode_has_seen_is_left_alone() -> None:
    """Selective checkpointing keeps values that are not the graph's to write to."""

    class Keeping(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func(*args, **(kwargs or {})))
            return seen[-1]

    module, seen = graph_of(lambda x: x.exp().sigmoid().tanh(), X), list[torch.Tensor]()
    with Keeping():  # type: ignore[no-untyped-call]
        interpret_graph(module)([X])
    for found, expected in zip(seen, (X.exp(), X.exp().sigmoid(), X.exp().sigmoid().tanh()), strict=True):
        assert torch.equal(found, expected)
