"""Spread one number over the tensor that rows are scattered into, while a graph runs operator by operator.

The gradient of an embedding is scattered into zeros as large as its table. Compiled code writes into these; an operator
by itself copies them first, and both would be there at once.
"""

import torch

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import add_call, add_full
from gact_fx.passes.pipeline import Context

aten = torch.ops.aten
# Of their first argument they make a dense copy, which they write to.
_WRITERS = (
    aten.index_put.default, aten._unsafe_index_put.default, aten._unsafe_masked_index_put_accumulate.default,
)  # fmt: skip


def spread_zeros(pair: GraphPair, context: Context) -> None:
    """Edit backward in place."""
    graph = pair.backward.graph
    for node in graph.find_nodes(op="call_function", target=aten.full.default):
        if any(user.target not in _WRITERS or user.all_input_nodes.index(node) for user in node.users):
            continue
        size, number = node.args
        with graph.inserting_before(node):
            one = add_full(graph, [], number, node.meta["val"])
            node.replace_all_uses_with(add_call(graph, aten.expand.default, (one, size), f"{node.name}_spread"))
        graph.erase_node(node)
