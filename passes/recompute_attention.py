"""Let backward compute fused attention's output and logsumexp again, from the query, key and value that it gets.

Fused attention saves its logsumexp, and backward exponentiates query times key against it. With rounded query and key
and an exact logsumexp, rows of probabilities no longer sum to one, and a sharp row is off by orders of magnitude.
Computed again from the rounded tensors, backward is the exact gradient of attention at those tensors, and the logsumexp
need not be stored.
"""

from operator import getitem

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import add_call
from gact_fx.passes.pipeline import Context

aten = torch.ops.aten
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default


def recompute_attention(pair: GraphPair, context: Context) -> None:
    """Edit ``pair.backward`` in place, wherever fused attention (on the CPU, without dropout) is differentiated.

    Attention with dropout is left alone: its mask cannot be drawn again.
    """
    graph = pair.backward.graph
    for node in graph.find_nodes(op="call_function", target=BACKWARD):
        _, query, key, value, output, logsumexp, dropout, is_causal = node.args[:8]
        if dropout:
            continue
        with graph.inserting_before(node):
            inputs = (query, key, value, dropout, is_causal)
            again = add_call(graph, FORWARD, inputs, f"{node.name}_again", **node.kwargs)
            for index, saved in enumerate((output, logsumexp)):
                part = add_call(graph, getitem, (again, index), f"{node.name}_again_{index}")
                node.replace_input_with(saved, part)


def recomputes(node: fx.Node) -> bool:
    """Whether this fused attention's backward reads an output that was computed again."""
    return node.target is BACKWARD and getattr(node.args[4], "target", None) is getitem
