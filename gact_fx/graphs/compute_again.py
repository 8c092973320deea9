"""Computes again for every reader, where a graph runs operator by operator, what compiled code never has in memory.

Inductor computes a cast, or what a few pointwise operators make, in every loop that reads it. A batch norm's backward
pass under autocast reads its gradient and its input in 32 bits twice, for sums and behind these, and neither is ever in
memory as a whole. `in_blocks` has what is computed again in memory block by block.
"""

from collections.abc import Collection
from operator import getitem

from torch import fx

from gact_fx.graphs.fused_loops import find_inlined, find_ranks, is_of_library
from gact_fx.graphs.live_memory import nbytes
from gact_fx.graphs.operator_table import REDUCTIONS
from gact_fx.graphs.operators import packet_of, returns_alias

# (a call, a phase, the calls of a library before it)
_Place = tuple[fx.Node, int, int]


def compute_again(graph: fx.Graph, repeatable: Collection[fx.Node]) -> None:
    """Edit ``graph`` in place: of the calls ``repeatable``, which are pointwise, every phase has its own.

    A call has a phase later than the reductions and the calls of a library that it depends on; and what runs behind a
    call of a library, though it does not depend on it, counts as later than what runs before. What would have other
    calls' results in memory longer, which are larger than its own, is not repeated.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    cheap = _find_cheap(graph, calls, repeatable)
    phases = _find_phases(graph)
    twins: dict[_Place, fx.Node] = {}
    originals: dict[fx.Node, fx.Node] = {}
    library_calls = 0
    ran: dict[fx.Node, int] = {}
    for reader in calls:
        library_calls += is_of_library(reader)
        ran[reader] = library_calls
        for source in reader.all_input_nodes:
            if source in cheap and (phases[source] < phases[reader] or ran[source] < library_calls):
                place = phases[reader], library_calls
                reader.replace_input_with(source, _again(source, reader, cheap, place, twins, originals))
    for node in reversed(list(graph.nodes)):
        if (node in cheap or node in originals) and not node.users:
            graph.erase_node(node)


def _find_cheap(graph: fx.Graph, calls: list[fx.Node], repeatable: Collection[fx.Node]) -> set[fx.Node]:
    views = {node for node in calls if node.target is getitem or returns_alias(node.target)}
    inlined = find_inlined(calls, views, find_ranks(graph))
    found: set[fx.Node] = set()
    # By call, what is in memory that it is computed from.
    reads: dict[fx.Node, set[fx.Node]] = {}
    for node in calls:
        if node not in repeatable or node not in inlined:
            continue
        reads[node] = set().union(*(reads[i] if i in found else {i} for i in node.all_input_nodes))
        if sum(map(nbytes, reads[node])) <= nbytes(node):
            found.add(node)
    return found


def _find_phases(graph: fx.Graph) -> dict[fx.Node, int]:
    phases: dict[fx.Node, int] = {}
    for node in graph.nodes:
        ends = ((phases[i], packet_of(i) in REDUCTIONS or is_of_library(i)) for i in node.all_input_nodes)
        phases[node] = max((phase + is_end for phase, is_end in ends), default=0)
    return phases


def _again(
    node: fx.Node,
    reader: fx.Node,
    cheap: Collection[fx.Node],
    place: tuple[int, int],
    twins: dict[_Place, fx.Node],
    originals: dict[fx.Node, fx.Node],
) -> fx.Node:
    """The twin of ``node`` for readers at ``place``, made before ``reader`` if there is none.

    It reads twins of its own: those that ``node`` reads, whose ``originals`` are known, are there for another place.
    """
    key = (node, *place)
    if key not in twins:
        sources = {
            i: _again(original, reader, cheap, place, twins, originals)
            for i in node.all_input_nodes
            if (original := originals.get(i, i)) in cheap
        }
        with reader.graph.inserting_before(reader):
            twins[key] = reader.graph.node_copy(node, lambda i: sources.get(i, i))
        originals[twins[key]] = node
    return twins[key]
