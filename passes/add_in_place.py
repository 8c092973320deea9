"""Add the gradient of an embedding to that of a layer with the same weight where it lies.

AOTAutograd scatters the gradient of an embedding into zeros as large as its table, and adds these to what else the
table's gradient is made of: where a language model's head has the weight of its embedding, two such tensors more than
there need be. Here the rows are added to that other part, which nobody else reads.
"""

from operator import getitem
from typing import Any

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import add_call, add_full, behind
from gact_fx.passes.pipeline import Context

aten = torch.ops.aten
# Their results are memory of their own.
_MAKERS = (aten.mm.default, torch.ops.gact_fx.linear_cross_entropy_backward.default)


def add_in_place(pair: GraphPair, context: Context) -> None:
    """Edit backward in place."""
    add_rows_in_place(pair.backward.graph)


def add_rows_in_place(graph: fx.Graph) -> None:
    """Edit a graph of backward in place: it then writes to what it made, and can no longer be differentiated."""
    for total in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        parts = [part for part in total.args if isinstance(part, fx.Node)]
        scattered = [part for part in parts if _rows(part) is not None and len(part.users) == 1]
        others = [part for part in parts if part not in scattered]
        is_sum = len(others) == 1 and len(scattered) == 1 and not total.kwargs
        if is_sum and _is_like(scattered[0], total) and _is_like(others[0], total) and _is_own(others[0]):
            _add(graph, total, others[0], scattered[0])


def _rows(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """The rows that ``node`` adds to zeros: whether, where (one index) and what; None where it does nothing of it."""
    zeros: Any
    mask: Any
    indices: Any
    values: Any
    if node.target is aten._unsafe_masked_index_put_accumulate.default:
        zeros, mask, indices, values = node.args
    elif node.target is aten.index_put.default and node.args[3:] == (True,):
        (zeros, indices, values), mask = node.args[:3], None
    else:
        return None
    # `spread_numbers` leaves one number, expanded.
    number = behind(zeros, (aten.expand,))
    is_zero = isinstance(number, fx.Node) and number.target is aten.full.default and number.args[1] == 0
    if not is_zero or len(indices) != 1 or (mask is not None and not _is_of_rows(mask, indices[0])):
        return None
    return mask, indices[0], values


def _is_of_rows(mask: fx.Node, index: fx.Node) -> bool:
    """Whether ``mask`` says of every index whether its row is added."""
    return tuple(mask.meta["val"].shape) == (*index.meta["val"].shape, 1)


def _is_like(node: fx.Node, total: fx.Node) -> bool:
    a, b = node.meta["val"], total.meta["val"]
    return bool(a.shape == b.shape and a.dtype == b.dtype)


def _is_own(node: fx.Node) -> bool:
    """Whether ``node`` is memory that backward itself made, and that nobody else reads."""
    source = node.args[0] if node.target is getitem else node
    return isinstance(source, fx.Node) and source.target in _MAKERS and len(node.users) == 1


def _add(graph: fx.Graph, total: fx.Node, into: fx.Node, scattered: fx.Node) -> None:
    found = _rows(scattered)
    assert found is not None
    mask, index, values = found
    with graph.inserting_before(total):
        if mask is not None:
            # Where nothing is to be added there may be no such row either.
            rows = add_call(graph, aten.squeeze.dim, (mask, -1), f"{mask.name}_rows")
            index, values = (
                add_call(graph, aten.where.self, (which, x, add_full(graph, [], 0, x.meta["val"])), f"{x.name}_inside")
                for which, x in ((rows, index), (mask, values))
            )
        result = add_call(graph, aten.index_put_.default, (into, [index], values, True), f"{total.name}_in_place")
    total.replace_all_uses_with(result)
    for node in (total, scattered):
        graph.erase_node(node)
