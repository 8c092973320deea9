"""Let backward compute fused attention's output and logsumexp again, from the query, key and value that it gets.

Fused attention saves its logsumexp, and backward exponentiates query times key against it. With rounded query and key
and an exact logsumexp, rows of probabilities no longer sum to one, and a sharp row is off by orders of magnitude.
Computed again from the rounded tensors, backward is the exact gradient of attention at those tensors, and the logsumexp
need not be stored. Nor need the output, which the layer behind attention reads for the gradient of its weight: it is
there by then.
"""

from operator import getitem

from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import add_call, ancestors, behind
from gact_fx.graphs.operator_table import FUSED_ATTENTION, NAMES, PRODUCTS
from gact_fx.graphs.operators import arguments_of, call_with, packet_of
from gact_fx.passes.find_bends import dependents_within
from gact_fx.passes.find_masks import derivable_nodes
from gact_fx.passes.pipeline import Context


def recompute_attention(pair: GraphPair, context: Context) -> None:
    """Edit ``pair.backward`` in place, wherever fused attention is differentiated.

    Of attention with dropout, whose mask cannot be drawn again, the output stays stored: the logsumexp, which dropout
    does not change, alone is computed again.
    """
    graph, derivable = pair.backward.graph, derivable_nodes(pair)
    for node in [n for n in graph.nodes if n.target in FUSED_ATTENTION]:
        given = arguments_of(node.target, node.args, node.kwargs)
        output, has_dropout = behind(given["out"], NAMES), bool(given["dropout_p"])
        # A layer that is itself computed again reads the output earlier, when attention need not be there yet.
        is_needed_early = any(packet_of(n) in PRODUCTS for n in dependents_within(output, derivable))
        is_last = not has_dropout and not is_needed_early
        first = min([node, *(output.users if is_last else ())])
        forward = FUSED_ATTENTION[node.target]
        fixed = {"dropout_p": 0.0, "compute_log_sumexp": True, "return_debug_mask": False}
        inputs, options = call_with(forward, given | fixed)
        _move_before(first, [i for i in (*inputs, *options.values()) if isinstance(i, fx.Node)])
        with graph.inserting_before(first):
            again = add_call(graph, forward, inputs, f"{node.name}_again", **options)
            parts = [add_call(graph, getitem, (again, index), f"{node.name}_again_{index}") for index in range(2)]
        if is_last:
            output.replace_all_uses_with(parts[0])
        computed = {"logsumexp": parts[1], **({} if has_dropout else {"out": parts[0]})}
        node.args, node.kwargs = call_with(node.target, given | computed)


def _move_before(place: fx.Node, nodes: list[fx.Node]) -> None:
    """Compute ``nodes``, which do not depend on ``place``, before it."""
    for node in sorted(ancestors(nodes, lambda source: source < place)):
        if node > place:
            place.prepend(node)


def recomputes(node: fx.Node) -> bool:
    """Whether this is fused attention's backward, and reads a logsumexp that was computed again."""
    if node.target not in FUSED_ATTENTION:
        return False
    return getattr(arguments_of(node.target, node.args, node.kwargs)["logsumexp"], "target", None) is getitem
