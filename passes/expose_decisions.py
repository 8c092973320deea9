"""Spell out, in backward, the decisions that hide in ReLU, clamp, abs, maximum and minimum.

Recomputed from a rounded value near its kink, ``relu(x)`` is biased: the mean of ``relu(Q(x))`` is not ``relu(x)``.
Written as ``where(x <= 0, 0, x)`` its decision is a comparison, which `find_masks` has stored exactly, and what remains
is linear in x.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import add_call, add_full, dependents
from gact_fx.graphs.operator_table import NAMES
from gact_fx.graphs.operators import packet_of
from gact_fx.passes.pipeline import Context

aten = torch.ops.aten
# (target, *args) -> a new call, named after the node that is spelled out
Write = Callable[..., fx.Node]


def expose_decisions(pair: GraphPair, context: Context) -> None:
    """Edit ``pair.backward`` in place: every operator with a kink that does not depend on tangents."""
    graph = pair.backward.graph
    tangents = pair.tangents()
    depends = dependents(graph, lambda node: node.name in tangents)
    # Attention that is computed again has none (`find_attention`), and is known by its nodes' names.
    without = depends | {node for node in graph.nodes if node.name in context.attention}
    for node in list(graph.nodes):
        if node.op == "call_function" and node not in without and _is_real(node):
            spell = _SPELLINGS.get(node.target)
            if spell is not None:
                write = partial(_write, graph, f"{node.name}_spelled")
                with graph.inserting_before(node):
                    spelled = spell(write, *node.args, **node.kwargs)
                if spelled is not None:
                    spelled.meta["spells"] = node.name
                    _compare_inputs_instead(node)
                    node.replace_all_uses_with(spelled)


def _write(graph: fx.Graph, name: str, target: Any, *args: Any) -> fx.Node:
    return add_call(graph, target, args, name)


def _where(write: Write, condition: fx.Node, left: Any, right: Any) -> fx.Node:
    """``where`` with numbers, and sizes that vary, in the dtype of the tensor beside them."""
    like = (left if _is_tensor(left) else right).meta["val"]
    branches = [x if _is_tensor(x) else add_full(condition.graph, [], x, like) for x in (left, right)]
    return write(aten.where.self, condition, *branches)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, fx.Node) and isinstance(x.meta.get("val"), torch.Tensor)


def _compare_inputs_instead(node: fx.Node) -> None:
    """``relu(x) <= 0``, as relu's derivative asks, is ``x <= 0``: one decision, not two."""
    if node.target is not aten.relu.default:
        return
    (source,) = node.all_input_nodes
    # The first of them, which is before all who are to read it.
    twin = min(user for user in source.users if user.target is aten.le.Scalar and user.args == (source, 0))
    stack = [node]
    while stack:
        alias = stack.pop()
        for user in list(alias.users):
            if user.target is aten.le.Scalar and user.args == (alias, 0):
                user.replace_all_uses_with(twin)
            elif packet_of(user) in NAMES:
                stack.append(user)


# NaN compares as false throughout, and must come out again.
def _relu(write: Write, x: fx.Node) -> fx.Node:
    return _where(write, write(aten.le.Scalar, x, 0), 0.0, x)


def _clamp(write: Write, x: fx.Node, low: Any = None, high: Any = None) -> fx.Node | None:
    varies = isinstance(low, fx.Node) or isinstance(high, fx.Node)
    if low is not None and high is not None and not varies and not low <= high:
        return None  # a constant
    bounded = x if low is None else _where(write, write(aten.lt.Scalar, x, low), low, x)
    if high is None:
        return bounded
    # Of sizes that vary the lower bound may be the larger one, and then the upper one counts.
    return _where(write, write(aten.gt.Scalar, bounded if varies else x, high), high, bounded)


def _abs(write: Write, x: fx.Node) -> fx.Node:
    return _where(write, write(aten.lt.Scalar, x, 0), write(aten.neg.default, x), x)


def _pick(compare: Any, write: Write, left: fx.Node, right: fx.Node) -> fx.Node | None:
    if left.meta["val"].shape != right.meta["val"].shape or left.meta["val"].dtype != right.meta["val"].dtype:
        return None  # broadcast: rare, and its kink is left as it is
    takes_right = write(aten.logical_or.default, write(compare, left, right), write(aten.isnan.default, right))
    return write(aten.where.self, takes_right, right, left)


def _is_real(node: fx.Node) -> bool:
    """Whether floats are computed from floats of the same dtype.

    Complex numbers, which have an absolute value, do not compare; of integers, which a bound may make floats, decisions
    are exact as they are.
    """
    value = node.meta.get("val")
    inputs = [i.meta.get("val") for i in node.all_input_nodes]
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return False
    return all(i.dtype is value.dtype for i in inputs if isinstance(i, torch.Tensor))


_SPELLINGS: dict[Any, Callable[..., fx.Node | None]] = {
    aten.relu.default: _relu,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: lambda write, x, high: _clamp(write, x, None, high),
    aten.clamp.default: _clamp,
    aten.abs.default: _abs,
    aten.maximum.default: partial(_pick, aten.le.Tensor),
    aten.minimum.default: partial(_pick, aten.ge.Tensor),
}
