"""Let backward compute fused attention's output and logsumexp again, from the query, key and value that it gets.

Fused attention saves its logsumexp, and backward exponentiates query times key against it. With rounded query and key
and an exact logsumexp, rows of probabilities no longer sum to one, and a sharp row is off by orders of magnitude.
Computed again from the rounded tensors, backward is the exact gradient of attention at those tensors, and the logsumexp
need not be stored. Nor need the output, which the layer behind attention reads for the gradient of its weight: it is
there by then.
"""

from operator import getitem

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import add_call, ancestors, behind
from gact_fx.graphs.operator_table import NAMES, PRODUCTS
from gact_fx.graphs.operators import packet_of
from gact_fx.passes.find_bends import dependents_within
from gact_fx.passes.find_masks import derivable_nodes
from gact_fx.passes.pipeline import Context

aten = torch.ops.aten
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default


def recompute_attention(pair: GraphPair, context: Context) -> None:
    """Edit ``pair.backward`` in place, wherever fused attention (on the CPU, without dropout) is differentiated.

    Attention with dropout is left alone: its mask cannot be drawn again.
    """
    graph, derivable = pair.backward.graph, derivable_nodes(pair)
    for node in graph.find_nodes(op="call_function", target=BACKWARD):
        _, query, key, value, output, _, dropout, is_causal = node.args[:8]
        if dropout:
            continue
        output = behind(output, NAMES)
        # A layer that is itself computed again reads the output earlier, when attention need not be there yet.
        is_last = not any(packet_of(n) in PRODUCTS for n in dependents_within(output, derivable))
        first = min([node, *(output.users if is_last else ())])
        inputs = (query, key, value, dropout, is_causal)
        _move_before(first, [query, key, value, *(i for i in node.kwargs.values() if isinstance(i, fx.Node))])
        with graph.inserting_before(first):
            again = add_call(graph, FORWARD, inputs, f"{node.name}_again", **node.kwargs)
            parts = [add_call(graph, getitem, (again, index), f"{node.name}_again_{index}") for index in range(2)]
        if is_last:
            output.replace_all_uses_with(parts[0])
        node.args = (*node.args[:4], *parts, *node.args[6:])


def _move_before(place: fx.Node, nodes: list[fx.Node]) -> None:
    """Compute ``nodes``, which do not depend on ``place``, before it."""
    for node in sorted(ancestors(nodes, lambda source: source < place)):
        if node > place:
            place.prepend(node)


def recomputes(node: fx.Node) -> bool:
    """Whether this fused attention's backward reads an output that was computed again."""
    return node.target is BACKWARD and getattr(node.args[4], "target", None) is getitem
