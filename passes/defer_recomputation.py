"""Move what backward computes from saved values to right before its first use, so that it lives as briefly as it can.

The partitioner orders recomputed chains for the values that they were cut from. Once part of a chain is read from a
blob instead, what remains would be decompressed long before it is needed, many layers at a time.
"""

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import dependents
from gact_fx.passes.pipeline import Context


def defer_recomputation(pair: GraphPair, context: Context) -> None:
    """Reorder ``pair.backward`` in place; only nodes that do not depend on tangents move."""
    graph = pair.backward.graph
    tangents = pair.tangents()
    depends = dependents(graph, lambda node: node.name in tangents)
    # From the end, so that a chain moves link by link.
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node not in depends and node.users:
            min(node.users).prepend(node)
