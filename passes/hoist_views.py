"""Move views in forward to right behind what they are views of.

Transposes that only backward reads come from backward's part of the joint graph, and stand at forward's end. Codes
are made behind the last use of what they stand for: there, everything would be whole until forward has ended, unless
the inner compiler finds an order of its own.
"""

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.operators import returns_alias
from gact_fx.passes.pipeline import Context


def hoist_views(pair: GraphPair, context: Context) -> None:
    """Reorder ``pair.forward`` in place. Views of what the caller gave stay, as the caller's tensors do."""
    for node in list(pair.forward.graph.nodes):
        if node.op == "call_function" and returns_alias(node.target):
            last = max(node.all_input_nodes)
            if last.op == "call_function":
                last.append(node)
