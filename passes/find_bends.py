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
from gact_fx.graphs.linearity import are_near, are_numbers, is_affine, is_pointwise, numbers, spread, tried_on
from gact_fx.graphs.operator_table import MOVES, PRODUCTS
from gact_fx.graphs.operators import packet_of

# Numbers of order one: as activations mostly are.
ORDER = 4.0


@dataclass(frozen=True)
class Coefficients:
    """What backward makes of a tensor up to where it meets tangents: these backward nodes, of one ``dtype``, with
    ``numel`` elements in all.

    Stored in the tensor's place they need ``masks`` beside them, of ``mask_numel`` elements: those by which tangents
    are decided. There are no ``nodes`` where these would be too many. ``frees``: kept tensors that nobody reads then.
    ``retakes``: backward can take the tensor's other masks from its values again.
    """

    nodes: tuple[str, ...]
    dtype: torch.dtype
    numel: int
    masks: tuple[str, ...]
    mask_numel: int
    frees: tuple[str, ...]
    retakes: bool


def dependents_within(start: fx.Node, within: Collection[fx.Node], masks: Collection[str] = ()) -> set[fx.Node]:
    """``start``, and the nodes of ``within`` that follow from it, but for ``masks``, which are stored exactly."""
    seen, stack = {start}, [start]
    while stack:
        new = [user for user in stack.pop().users if user in within and user not in seen and user.name not in masks]
        seen.update(new)
        stack.extend(new)
    return seen


def bends(chain: Collection[fx.Node], starts: Collection[fx.Node], straight: Collection[fx.Node] = ()) -> bool:
    """Whether any node of ``chain`` behind its ``starts`` is not affine in the others; ``straight`` are taken to be."""
    behind = (node for node in chain if node not in starts and node not in straight)
    return not all(_is_straight(node, chain) for node in behind)


def is_tame(chain: Collection[fx.Node], starts: Collection[fx.Node]) -> bool:
    """Whether what backward makes of ``starts`` in ``chain`` is defined for all numbers, and smooth at 8 bits.

    Numbers tell, of what works element by element: every operator of the chain is tried between the least and the
    largest of the numbers that reach it. From all magnitudes it makes numbers; of numbers of order one, a step of 8
    bits moves nothing by more than a quarter.
    """
    anywhere, usual = dict.fromkeys(starts, numbers()), dict.fromkeys(starts, numbers(ORDER))
    for node in sorted(chain):
        inputs = [i for i in node.all_input_nodes if i in usual]
        if node in starts or not inputs:
            continue
        if packet_of(node) in MOVES or packet_of(node) is None:
            anywhere[node], usual[node] = anywhere[inputs[0]], usual[inputs[0]]
            continue
        if not is_pointwise(node):
            return False
        between = {i: spread(usual[i]) for i in inputs}
        beside = {i: spread(usual[i], moved=1 / 255) for i in inputs}
        poles = tried_on(node, {i: spread(anywhere[i]) for i in inputs})
        here, there = tried_on(node, between, ORDER), tried_on(node, beside, ORDER)
        wide, found = tried_on(node, anywhere), tried_on(node, usual, ORDER)
        if poles is None or here is None or there is None or wide is None or found is None:
            return False
        if not are_numbers(poles) or not are_near(here, there, 0.25):
            return False
        anywhere[node], usual[node] = wide, found
    return True


def poles(chain: Collection[fx.Node], starts: Collection[fx.Node], largest: float = math.inf) -> set[fx.Node]:
    """The nodes of ``chain`` that make no number of some number that ``starts`` lead to, element by element.

    ``largest`` is the largest magnitude of what is tried for ``starts``.
    """
    anywhere, found = dict.fromkeys(starts, numbers(largest)), set[fx.Node]()
    for node in sorted(chain):
        inputs = [i for i in node.all_input_nodes if i in chain]
        if node in starts or not inputs or any(i not in anywhere for i in inputs):
            continue
        if packet_of(node) in MOVES or packet_of(node) is None:
            anywhere[node] = anywhere[inputs[0]]
        elif is_pointwise(node):
            between = tried_on(node, {i: spread(anywhere[i]) for i in inputs}, largest)
            wide = tried_on(node, {i: anywhere[i] for i in inputs}, largest)
            if between is not None and wide is not None and are_numbers(between) and are_numbers(wide):
                anywhere[node] = wide
            elif between is not None and wide is not None:
                found.add(node)
                # Next to a pole lies every number, and behind one pole may lie others.
                anywhere[node] = numbers(largest)
    return found


def straight_bases(
    chain: Collection[fx.Node], start: fx.Node, derivable: Collection[fx.Node], masks: Container[str]
) -> list[fx.Node]:
    """Nodes of ``chain`` that all coefficients in it follow from by affine operators: the coefficients themselves, or
    what these came from, whichever has fewer elements. Decisions, the ``masks``, are not gone behind.
    """
    ends = meeting(chain, derivable)
    bases: dict[fx.Node, set[fx.Node]] = {}
    for node in sorted(chain):
        inputs = [i for i in node.all_input_nodes if i in chain]
        decides = any(i.name in masks for i in node.all_input_nodes)
        goes_on = node is not start and not decides and _is_straight(node, chain)
        bases[node] = set().union(*(bases[i] for i in inputs)) if goes_on else {node}
    found = sorted(set[fx.Node]().union(*(bases[node] for node in ends)))
    return min(found, ends, key=lambda nodes: sum(map(numel, nodes)))


def meeting(chain: Collection[fx.Node], derivable: Collection[fx.Node]) -> list[fx.Node]:
    """The nodes of ``chain`` that meet tangents, before anything moves their elements."""
    return sorted({_unmoved(node, chain) for node in chain if any(user not in derivable for user in node.users)})


def is_read_through(
    given: Collection[fx.Node], start: fx.Node, chain: Collection[fx.Node], derivable: Collection[fx.Node]
) -> bool:
    """Whether all that backward makes of ``start`` goes by way of the ``given`` nodes of ``chain``."""
    if not any(node in chain for node in dependents_within(start, derivable)):
        return False
    nodes = dependents_within(start, derivable, {node.name for node in given})
    return all(user in derivable for node in nodes for user in node.users)


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
