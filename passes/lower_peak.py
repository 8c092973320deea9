"""Lower the peak of backward, round by round: look what is live at the peak, and change how long something lives.

What is held across the peak is decoded again behind the peak (`decode_again`), or is cut to what is still needed of it
(`keep_parts`), or to fewer bits (`keep_narrow`); what is read together at the peak is added up in turn (`add_in_turn`).
A round changes one peak, and the next one looks for the new peak.

Compilers reorder and fuse what does not depend on each other. Hence the operator ``behind``: it hands over a copy of a
blob, and reads a tensor that has to be there before. They also compute a value anew in each of its readers, and hold
all that it is made of meanwhile. Hence the operator ``made``, which wants a tensor in memory.
"""

import copy
import math

from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.fused_loops import is_of_library
from gact_fx.graphs.operators import returns_alias, writes
from gact_fx.passes.add_in_turn import add_gradients, add_values
from gact_fx.passes.backward_peak import Look, decompress
from gact_fx.passes.decode_again import decode_again, decode_again_for_gradients
from gact_fx.passes.fuse_codec import is_spelled_out
from gact_fx.passes.keep_narrow import keep_narrow
from gact_fx.passes.keep_parts import keep_parts
from gact_fx.passes.pipeline import Context

# How many rounds there are at most, and how many in a row that find no lower peak: equal layers have equal peaks.
_ROUNDS, _PATIENCE = 60, 16
# The share of the peak that may be left for the rounds to be worth what they cost.
_WORTH = 0.99
# What a round tries, the first of them that finds anything. A gradient that is added up needs no value decoded again.
_WAYS = (keep_parts, keep_narrow, decode_again, add_values, add_gradients, decode_again_for_gradients)


def lower_peak(pair: GraphPair, context: Context) -> None:
    """Edit backward in place, or leave it as it is where the peak would hardly fall."""
    if not any(is_spelled_out(node, context) for node in pair.backward.graph.nodes):
        lower(pair, fused=context.config.inner == "inductor")


def lower(pair: GraphPair, *, fused: bool, patience: int = _PATIENCE) -> None:
    """`lower_peak` for backward that runs in loops, ``fused``, or operator by operator.

    It ends when more than ``patience`` rounds in a row have found no lower peak.
    """
    if _writes_inputs(pair):
        return
    graph = pair.backward.graph
    best = copy.deepcopy(graph)
    lowest, bound, unfruitful = math.inf, Look.at(pair, fused=fused).level * _WORTH, 0
    _share(graph)
    for _ in range(_ROUNDS + 1):
        look = Look.at(pair, fused=fused)
        unfruitful = 0 if look.level < lowest else unfruitful + 1
        lowest = min(lowest, look.level)
        if unfruitful == 0 and lowest <= bound:
            best = copy.deepcopy(graph)
        if unfruitful > patience or not any(way(look) for way in _WAYS):
            break
    # The last rounds may have found nothing lower, and all of them too little: that would cost time for nothing.
    pair.backward.graph = best


def _share(graph: fx.Graph) -> None:
    """Decode once what is decoded twice from one blob in one way, as values and for their mask, with loops between."""
    found: dict[str, fx.Node] = {}
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        if node.target is not decompress:
            if is_of_library(node):
                found = {}
            continue
        first = found.setdefault(str(node.args), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _writes_inputs(pair: GraphPair) -> bool:
    """Whether backward writes to what it is given: computed again, a value might be another one."""
    for node in pair.backward.graph.nodes:
        source = node if node.op == "call_function" and writes(node.target) else None
        while source is not None and source.op == "call_function":
            is_view = source is node or returns_alias(source.target)
            source = source.all_input_nodes[0] if is_view and source.all_input_nodes else None
        if source is not None:
            return True
    return False
