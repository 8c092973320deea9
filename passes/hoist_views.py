"""Move every view in forward right behind what it is a view of.

The partitioner leaves views that backward alone reads, such as transposed matrices, at forward's end. A tensor is
compressed behind the last of its readers: one such view would keep it whole until forward has ended.
"""

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import latest
from gact_fx.graphs.operators import returns_alias, writes
from gact_fx.passes.pipeline import Context


def hoist_views(pair: GraphPair, context: Context) -> None:
    """Edit ``pair.forward`` in place."""
    for node in list(pair.forward.graph.nodes):
        # What writes to its argument returns this, too, and has to wait for those who read what was there.
        if node.op == "call_function" and returns_alias(node.target) and not writes(node.target):
            latest(pair.forward, list(node.all_input_nodes)).append(node)
