"""Decode a value anew wherever it is read, in graphs that run operator by operator, such as those of profiling.

Backward reads a decoded tensor, or what is computed of one or two, for a weight of this layer and for the gradient of
an earlier one. Between the two it would be in memory, as large as it was before it was compressed. How long something
lives is only the order of the calls here: no compiler makes two values one again, or moves them.
"""

from collections.abc import Mapping

from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.fused_loops import is_of_library
from gact_fx.graphs.live_memory import nbytes
from gact_fx.graphs.operators import writes
from gact_fx.passes.backward_peak import decompress, dependents_of_tangents, is_cheap_call
from gact_fx.passes.pipeline import Context

# What is made of more calls is kept, and what has fewer bytes.
_MOST_CALLS, _LEAST_NBYTES = 16, 2**16
Chain = tuple[fx.Node, ...]


def decode_at_use(pair: GraphPair, context: Context) -> None:
    """Edit backward in place: between two calls of a library, each reader has a decoded value of its own."""
    graph = pair.backward.graph
    if any(writes(node.target) for node in graph.nodes):
        # Computed again behind that, a value might be another one.
        return
    chains = _chains(pair)
    twins: dict[fx.Node, fx.Node] = {}
    for reader in list(graph.nodes):
        if is_of_library(reader) and reader not in chains:
            # What is at hand where this call runs is not to be there at the next one.
            twins, before = {}, twins
        else:
            before = twins
        for value in reader.all_input_nodes if reader not in chains else ():
            if value in chains:
                reader.replace_input_with(value, _at_hand(chains[value], reader, before))


def _at_hand(chain: Chain, reader: fx.Node, twins: dict[fx.Node, fx.Node]) -> fx.Node:
    """The last value of ``chain``, computed right before ``reader`` but for what ``twins`` have already."""
    with reader.graph.inserting_before(reader):
        for node in chain:
            if node not in twins:
                twins[node] = reader.graph.node_copy(node, lambda n: twins.get(n, n))
    return twins[chain[-1]]


def _chains(pair: GraphPair) -> Mapping[fx.Node, Chain]:
    """By value that is decoded, or made of few that are, the calls that make it of what is saved, in their order."""
    depends = dependents_of_tangents(pair.backward.graph, pair.tangents())
    found: dict[fx.Node, Chain] = {}
    for node in pair.backward.graph.nodes:
        if node in depends or not is_cheap_call(node) or nbytes(node) < _LEAST_NBYTES:
            continue
        made = [i for i in node.all_input_nodes if i in found]
        is_held = all(i in found or i.op == "placeholder" or nbytes(i) < _LEAST_NBYTES for i in node.all_input_nodes)
        chain = (*dict.fromkeys(call for i in made for call in found[i]), node)
        if is_held and len(chain) <= _MOST_CALLS and any(call.target is decompress for call in chain):
            found[node] = chain
    return found
