"""Move what backward computes from saved values to right before its first use, so that it lives as briefly as it can.

The partitioner orders recomputed chains for the values that they were cut from. Once part of a chain is read from a
blob instead, what remains would be decompressed long before it is needed, many layers at a time. Of several values that
one node reads, the one that takes most memory beyond its own size while it is computed comes first, when the least of
the others is there (Sethi and Ullman, "The Generation of Optimal Code for Arithmetic Expressions", J. ACM 1970). What
several nodes read is no tree: it is counted both ways, and of both orders the one with the lower peak stays.
"""

from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import dependents
from gact_fx.graphs.live_memory import peak_nbytes, storages
from gact_fx.graphs.operators import has_collectives, returns_alias, writes
from gact_fx.passes.pipeline import Context


def defer_recomputation(pair: GraphPair, context: Context) -> None:
    """Reorder ``pair.backward`` in place; only nodes that do not depend on tangents move."""
    graph = pair.backward.graph
    tangents = pair.tangents()
    depends = dependents(graph, lambda node: node.name in tangents)
    calls = [node for node in graph.nodes if node.op == "call_function" and node.users and node not in depends]
    movable = {node for node in calls if not writes(node.target)}
    if not movable:
        return
    # Ranks have to meet in one order, whatever the sizes of their batches.
    if has_collectives(graph):
        return _place(graph, movable, dict.fromkeys(movable, 0))
    given, fused = graph.find_nodes(op="placeholder"), context.config.inner == "inductor" and not context.is_profiling
    # What others read as well may be there anyway, or else be let go by the last of them: neither is always better.
    peaks: dict[bool, int] = {}
    for shared in (True, False):
        _place(graph, movable, _excess(graph, movable, shared))
        peaks[shared] = peak_nbytes(graph, given, fused=fused)
    if peaks[True] < peaks[False]:
        _place(graph, movable, _excess(graph, movable, shared=True))


def _place(graph: fx.Graph, movable: set[fx.Node], excess: dict[fx.Node, int]) -> None:
    """Move every ``movable`` node to right before the first that reads it."""
    # From the end: a node is placed when all that read it are.
    waiting = {node: len(node.users) for node in movable}
    for anchor in reversed([node for node in graph.nodes if node not in movable]):
        last, ready = anchor, _released(anchor, waiting, excess)
        while ready:
            node = ready.pop()
            last.prepend(node)
            last = node
            ready += _released(node, waiting, excess)


def _released(user: fx.Node, waiting: dict[fx.Node, int], excess: dict[fx.Node, int]) -> list[fx.Node]:
    """What ``user`` was the last to wait for, in the order in which it is to be computed."""
    sources = [source for source in user.all_input_nodes if source in waiting]
    for source in sources:
        waiting[source] -= 1
    return sorted((s for s in sources if not waiting[s]), key=excess.__getitem__, reverse=True)


def _excess(graph: fx.Graph, movable: set[fx.Node], shared: bool) -> dict[fx.Node, int]:
    """By node of ``movable``, the bytes beyond its own that it takes to compute it.

    Values that several nodes read count for each of these where they are ``shared``, and else for none.
    """
    peaks: dict[fx.Node, int] = {}
    sizes: dict[fx.Node, int] = {}
    for node in (node for node in graph.nodes if node in movable):
        read = [source for source in node.all_input_nodes if source in movable]
        sources = [source for source in read if shared or len(source.users) == 1]
        there = peak = 0
        for source in sorted(sources, key=lambda s: peaks[s] - sizes[s], reverse=True):
            peak = max(peak, there + peaks[source])
            there += sizes[source]
        is_view = returns_alias(node.target)
        sizes[node] = there if is_view else sum(storages(node).values())
        peaks[node] = peak if is_view else max(peak, there + sizes[node])
    return {node: peaks[node] - sizes[node] for node in peaks}
