"""Find attention that a model spells out, whose probabilities backward computes again from query and key.

Probabilities have an element for every pair of positions, and are the most that a layer would store. Fused attention
keeps query and key alone, and so can this: backward reads both anyway, and one product more takes a hundredth of a
step. As there, backward is then the exact gradient of attention at the rounded query and key (`recompute_attention`).
"""

import math
from collections.abc import Collection

import torch
from torch import fx

from gact_fx.graphs.aot import JointGraph
from gact_fx.graphs.edit import ancestors, is_float, numel
from gact_fx.graphs.operator_table import CASTS, REORDERS
from gact_fx.graphs.operators import packet_of
from gact_fx.graphs.sizes import is_symbolic
from gact_fx.passes.is_cheap import is_cheap
from gact_fx.passes.pipeline import Context

aten = torch.ops.aten

_SOFTMAX = frozenset({aten.exp, aten._softmax, aten._safe_softmax})
# Between the two products: scale, masks, softmax and how it is spelled out where scores may be infinite, and dropout.
# Nothing in there is a decision that rounding could change.
_INNER = REORDERS | CASTS | _SOFTMAX | {
    aten.expand, aten.mul, aten.div, aten.add, aten.sub, aten.neg, aten.tanh, aten.where, aten.masked_fill, aten.amax,
    aten.sum, aten.abs, aten.isinf, aten.isnan, aten.logical_not, aten.any,
}  # fmt: skip


def find_attention(joint: JointGraph, context: Context) -> frozenset[str]:
    """Names of the nodes of ``joint`` from a product of query and key up to the product of probabilities and value.

    Left out are probabilities that forward reads otherwise, those with fewer elements than query and key together,
    and those for which large summands of the scores would have to be stored.
    """
    forward = joint.forward()
    found = set[fx.Node]()
    for node in forward:
        if packet_of(node) is aten.bmm:
            found |= _region(node, forward)
    return frozenset(node.name for node in found)


def _region(product: fx.Node, forward: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes from ``product`` on, where it is that of query and key; else none."""
    if numel(product) < sum(map(numel, product.all_input_nodes)):
        return set()
    region, stack = {product}, [product]
    while stack:
        for user in stack.pop().users:
            is_value = packet_of(user) is aten.bmm and len(region.intersection(user.all_input_nodes)) == 1
            is_size = is_symbolic(user.meta.get("val"))
            if user in region or is_value or is_size or (user not in forward and user.op == "call_function"):
                continue
            if not _is_inner(user):
                return set()
            region.add(user)
            stack.append(user)
    is_softmax = any(packet_of(node) in _SOFTMAX for node in region)
    return region if is_softmax and 4 * _beside(region, product) <= numel(product) else set()


def _is_inner(node: fx.Node) -> bool:
    if packet_of(node) not in (aten.eq, aten.ne):
        return packet_of(node) in _INNER
    value, other = node.args[:2]
    return value is other or other in (math.inf, -math.inf)


def _beside(region: Collection[fx.Node], product: fx.Node) -> int:
    """Elements of what the ``region`` reads but for query and key, as it would be stored."""
    sources = {source for node in region if node is not product for source in node.all_input_nodes}
    made = ancestors(sources.difference(region), lambda node: not is_cheap(node))
    return sum(numel(node) for node in made if node.op == "call_function" and is_float(node) and not is_cheap(node))
