"""Have backward read the exponential of a softmax whose scores another operator bends.

Backward reads the scores of a softmax through their exponential only, which is saved in their place
(`find_substitutes`). Not so where they were capped, as ``c * tanh(x / c)``: tanh's derivative asks for the scores as
well, and an error in them would pass the exponential. There, the exponential is saved beside them: it is linear in
backward. Decomposed log-softmax takes it a second time, of the logarithms; that is the same quotient as softmax.
"""

from typing import Any, TypeGuard

import torch
from torch import fx

from gact_fx.graphs.aot import JointGraph
from gact_fx.graphs.edit import add_call
from gact_fx.graphs.operator_table import CASTS, CURVED, REORDERS
from gact_fx.graphs.operators import packet_of
from gact_fx.graphs.sizes import hint
from gact_fx.passes.pipeline import Context

aten = torch.ops.aten
# What a derivative does not read its argument for.
_LINEAR = REORDERS | CASTS | {
    aten.add, aten.sub, aten.mul, aten.div, aten.neg, aten.where, aten.masked_fill, aten.expand,
}  # fmt: skip


def share_softmax(joint: JointGraph, context: Context) -> None:
    """Edit the joint graph in place: ``exp(x - max - log(sum))`` as ``exp(x - max) / sum``, of bent scores x."""
    graph = joint.joint.graph
    for node in graph.find_nodes(op="call_function", target=aten.exp.default):
        found = _log_softmax(node)
        if found is not None and is_exp_of_bent(found[0]):
            with graph.inserting_before(node):
                quotient = add_call(graph, aten.div.Tensor, found, f"{node.name}_shared")
            node.replace_all_uses_with(quotient)
            graph.erase_node(node)


def is_exp_of_bent(node: fx.Node) -> bool:
    """Whether ``node`` is the exponential in a softmax over what an operator made whose derivative reads it."""
    shifted = node.args[0] if node.target is aten.exp.default else None
    if not _is_difference(shifted):
        return False
    scores, largest = shifted.args[:2]
    is_shift = isinstance(largest, fx.Node) and largest.target is aten.amax.default and largest.args[0] is scores
    return is_shift and isinstance(scores, fx.Node) and _is_bent(scores)


def _log_softmax(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """For ``exp(s - log(sum(exp(s))))`` the inner exponential and its sum."""
    logarithms = node.args[0]
    if not _is_difference(logarithms):
        return None
    shifted, log = logarithms.args[:2]
    if not isinstance(log, fx.Node) or log.target is not aten.log.default:
        return None
    (total,) = log.all_input_nodes
    if total.target is not aten.sum.dim_IntList:
        return None
    (exponential,) = total.all_input_nodes
    is_same = exponential.target is aten.exp.default and exponential.args[0] is shifted
    return (exponential, total) if is_same else None


def _is_difference(node: Any) -> TypeGuard[fx.Node]:
    """Whether it is one of two values, neither of them scaled (``alpha``)."""
    return isinstance(node, fx.Node) and node.target is aten.sub.Tensor and not node.kwargs


def _is_bent(scores: fx.Node) -> bool:
    """Whether a curved operator is among those that made ``scores``, element by element."""
    stack, seen = [scores], set[fx.Node]()
    while stack:
        node = stack.pop()
        packet = packet_of(node)
        if packet in CURVED:
            return True
        if node in seen or packet not in _LINEAR:
            continue
        seen.add(node)
        stack += [i for i in node.all_input_nodes if _is_as_large(i, scores)]
    return False


def _is_as_large(node: fx.Node, scores: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return False
    return hint(value.numel()) == hint(scores.meta["val"].numel())
