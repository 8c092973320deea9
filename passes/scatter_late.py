"""Have gradients of embeddings made when all matrix products of backward are done.

The gradient of a table is larger than what is scattered into it. Inductor fuses the scatter with whatever reads the
same tensors, such as the embedding itself, which backward computes again for the products behind it: the table's
gradient is then there while all that these products read still waits.
"""

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import add_call, ancestors, dependents
from gact_fx.graphs.live_memory import nbytes
from gact_fx.graphs.operator_table import PRODUCTS, REDUCTIONS, SCATTERS
from gact_fx.graphs.operators import packet_of
from gact_fx.passes.pipeline import Context

aten = torch.ops.aten
behind = torch.ops.gact_fx.behind.default

_SCATTERS = SCATTERS | {aten._unsafe_index_put, aten._unsafe_masked_index_put_accumulate, aten.embedding_dense_backward}
# So many times larger than its source is a gradient that is worth a copy of the source.
_LARGER = 4


def scatter_late(pair: GraphPair, context: Context) -> None:
    """Edit backward in place: what is scattered is read `behind` the last product that does not lead to it.

    Nothing is done where graphs run operator by operator, in the order that they are in.
    """
    if context.config.inner != "inductor":
        return
    graph, tangents = pair.backward.graph, pair.tangents()
    depends = dependents(graph, lambda node: node.name in tangents)
    products = [node for node in graph.nodes if node in depends and packet_of(node) in PRODUCTS - REDUCTIONS]
    for node in pair.backward_outputs:
        if not isinstance(node, fx.Node) or packet_of(node) not in _SCATTERS:
            continue
        sources = [source for source in node.all_input_nodes if source in depends]
        before = ancestors(sources)
        last = next((product for product in reversed(products) if product not in before), None)
        if last is None or len(sources) != 1 or len(node.users) != 1 or nbytes(node) < _LARGER * nbytes(sources[0]):
            continue
        place = max(last, node)
        with graph.inserting_after(place):
            late = add_call(graph, behind, (sources[0], last), f"{sources[0].name}_late")
        node.replace_input_with(sources[0], late)
        late.append(node)
