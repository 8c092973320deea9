"""Find the saved tensors in which backward bends: what it computes of them, up to its coefficients, is not affine.

Backward is linear in its coefficients: the nodes that depend on saved values alone and meet a tangent. Where a
coefficient is affine in a tensor, an error of the tensor moves the gradient in proportion. Elsewhere it may be biased,
of any size, or not finite, and is measured at the coefficients themselves (`gact_fx.profiling.coefficient_meter`).
"""

import math
from collections.abc import Collection, Container
from dataclasses import dataclass

import torch
from torch import fx

from gact_fx.graphs.edit import numel
from gact_fx.graphs.linearity import are_near, are_numbers, is_affine, is_pointwise, numbers, tried_on
from gact_fx.graphs.operator_table import MOVES, PRODUCTS
from gact_fx.graphs.operators import packet_of

aten = torch.ops.aten
# Numbers of order one: as activations mostly are.
_ORDER = 4.0


@dataclass(frozen=True)
class Coefficients:
    """What backward makes of a tensor up to where it meets tangents: these backward nodes, of one ``dtype``, with
    ``numel`` elements in all.

    Stored in the tensor's place they need ``masks`` beside them, of ``mask_numel`` elements: those by which tangents
    are decided. There are no ``nodes`` where these would be too many. ``retakes``: backward can take the tensor's other
    masks from its values again.
    """

    nodes: tuple[str, ...]
    dtype: torch.dtype
    numel: int
    masks: tuple[str, ...]
    mask_numel: int
    retakes: bool


def dependents_within(start: fx.Node, within: Collection[fx.Node], masks: Collection[str] = ()) -> set[fx.Node]:
    """``start``, and the nodes of ``within`` that follow from it, but for ``masks``, which are stored exactly."""
    seen, stack = {start}, [start]
    while stack:
        new = [user for user in stack.pop().users if user in within and user not in seen and user.name not in masks]
        seen.update(new)
        stack.extend(new)
    return seen


def bends(chain: Collection[fx.Node], start: fx.Node, straight: Collection[object] = ()) -> bool:
    """Whether any node of ``chain`` behind ``start`` is not affine in the others; ``straight`` are taken to be."""
    behind = (node for node in chain if node is not start and node.target not in straight)
    return not all(_is_straight(node, chain) for node in behind)


def is_tame(chain: Collection[fx.Node], start: fx.Node) -> bool:
    """Whether what backward makes of ``start`` in ``chain`` is defined for all numbers, and smooth at 8 bits.

    Numbers tell, of what works element by element: those of every magnitude give numbers, and a step between codes of
    those of order one moves nothing by more than a tenth. In float64: codes reach half a step beyond stored values, and
    what overflows there nearly does so in the model itself.
    """
    ends = [node for node in chain if any(user not in chain for user in node.users)]
    anywhere = _tried_along(chain, start, numbers(), math.inf)
    here, beside = (_tried_along(chain, start, numbers(_ORDER, moved), _ORDER) for moved in (0.0, 2 * _ORDER / 255))
    if anywhere is None or here is None or beside is None:
        return False
    return all(are_numbers(anywhere[end]) and are_near(here[end], beside[end], 0.1) for end in ends)


def _tried_along(
    chain: Collection[fx.Node], start: fx.Node, given: torch.Tensor, largest: float
) -> dict[fx.Node, torch.Tensor] | None:
    """What every node of ``chain`` makes of what is ``given`` for ``start``; None where one is not pointwise."""
    found = {start: given}
    for node in sorted(chain):
        inputs = [i for i in node.all_input_nodes if i in found]
        if node is start or not inputs:
            continue
        is_move = packet_of(node) in MOVES or packet_of(node) is None
        tried = found[inputs[0]] if is_move else tried_on(node, found, largest) if is_pointwise(node) else None
        if tried is None:
            return None
        found[node] = tried
    return found


def straight_bases(
    chain: Collection[fx.Node], start: fx.Node, derivable: Collection[fx.Node], masks: Container[str]
) -> list[fx.Node]:
    """Nodes of ``chain`` that all coefficients in it follow from by affine operators: the coefficients themselves, or
    what these came from, whichever has fewer elements. Decisions, the ``masks``, are not gone behind.
    """
    ends = {_unmoved(node, chain) for node in chain if any(user not in derivable for user in node.users)}
    bases: dict[fx.Node, set[fx.Node]] = {}
    for node in sorted(chain):
        inputs = [i for i in node.all_input_nodes if i in chain]
        decides = any(i.name in masks for i in node.all_input_nodes)
        goes_on = node is not start and not decides and _is_straight(node, chain)
        bases[node] = set().union(*(bases[i] for i in inputs)) if goes_on else {node}
    found = sorted(set[fx.Node]().union(*(bases[node] for node in ends)))
    return min(found, sorted(ends), key=lambda nodes: sum(map(numel, nodes)))


def moves(node: fx.Node) -> bool:
    """Whether ``node`` does nothing but move the elements of one tensor."""
    inputs = node.all_input_nodes
    return packet_of(node) in MOVES and len(inputs) == 1 and numel(node) == numel(inputs[0])


def _unmoved(node: fx.Node, chain: Collection[fx.Node]) -> fx.Node:
    while moves(node) and node.all_input_nodes[0] in chain:
        node = node.all_input_nodes[0]
    return node


def _is_straight(node: fx.Node, chain: Collection[fx.Node]) -> bool:
    inputs = [i for i in node.all_input_nodes if i in chain]
    is_getitem = packet_of(node) is None and len(node.all_input_nodes) == 1
    if packet_of(node) in PRODUCTS and len(inputs) == 1:
        return [i for i in node.args if i is inputs[0]] == inputs
    return packet_of(node) in MOVES or is_getitem or (is_pointwise(node) and is_affine(node, inputs))
