"""Spread one number over a tensor that is full of it, while a graph runs operator by operator.

Compiled code never makes such a tensor. Operator by operator it is made, layers of one size share it, and it lives
through all of them. The gradient of an embedding is scattered into zeros as large as its table: the operator
copies them first, and both would be there at once.
"""

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import add_call, add_full
from gact_fx.graphs.linearity import is_pointwise
from gact_fx.graphs.sizes import have_same_shape, is_same
from gact_fx.passes.pipeline import Context

aten = torch.ops.aten
# Of their first argument they make a dense copy, which they write to.
_WRITERS = (
    aten.index_put.default, aten._unsafe_index_put.default, aten._unsafe_masked_index_put_accumulate.default,
)  # fmt: skip


def spread_numbers(pair: GraphPair, context: Context) -> None:
    """Edit both graphs in place."""
    for module in (pair.forward, pair.backward):
        _spread(module.graph)


def _spread(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.full.default):
        size, number = node.args
        is_number = isinstance(number, int | float) and bool(size)
        if is_number and all(_takes_any_layout(user, node) for user in node.users):
            with graph.inserting_before(node):
                one = add_full(graph, [], number, node.meta["val"])
                node.replace_all_uses_with(add_call(graph, aten.expand.default, (one, size), f"{node.name}_spread"))
            graph.erase_node(node)


def _takes_any_layout(user: fx.Node, node: fx.Node) -> bool:
    """Whether the result of ``user`` is laid out the same however ``node`` is: as all else that has its shape."""
    if user.target in _WRITERS:
        return user.all_input_nodes.index(node) == 0
    like = node.meta["val"]
    beside = [source.meta.get("val") for source in user.all_input_nodes if source is not node]
    alike = [x for x in beside if isinstance(x, torch.Tensor) and have_same_shape(x, like)]
    return is_pointwise(user) and bool(alike) and all(_have_same_strides(x, like) for x in alike)


def _have_same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(is_same(m, n) for m, n in zip(a.stride(), b.stride(), strict=True))
