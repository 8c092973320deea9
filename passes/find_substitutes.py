"""Find what to save instead of a tensor, so that backward is linear in what was rounded.

Backward often reads a saved tensor through one chain of operators only: ``exp(x - max) / sum`` of attention scores,
``gelu'(x)``, ``1 - tanh(x)^2``. Rounding x and applying the chain is biased where the chain bends, and without bound
where it is an exponential or a quotient. The end of the chain is as large as x and can be computed in forward: rounding
*it* leaves a gradient that is linear in the rounded values, hence unbiased.

Where no such end exists and the chain is unbounded, the tensor is refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from gact_fx.codec.layout import SOURCE_DTYPES
from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import behind, is_float
from gact_fx.graphs.linearity import is_affine, is_pointwise
from gact_fx.graphs.operator_table import CASTS, NONLINEAR, REORDERS
from gact_fx.graphs.operators import packet_of
from gact_fx.passes.find_bends import bends
from gact_fx.passes.find_masks import derivable_nodes, is_known
from gact_fx.passes.recompute_attention import FORWARD as ATTENTION
from gact_fx.passes.recompute_attention import recomputes

_QUERY_AND_KEY = (1, 2)


@dataclass(frozen=True)
class Substitutes:
    """``instead``: saved tensor → the backward node to save in its place; ``refused``: saved tensor → why not.

    ``curved``: saved tensors that are rounded where the gradient bends in them (query and key of fused attention).
    ``unknown``: saved tensor → an operator that reads it, or what follows from it, of which nothing is known.
    """

    instead: dict[str, str]
    refused: dict[str, str]
    curved: frozenset[str]
    unknown: dict[str, str]


def find_substitutes(
    pair: GraphPair,
    lossy: frozenset[str],
    masks: frozenset[str],
    whole: Mapping[str, str],
) -> Substitutes:
    """Substitutes for the ``lossy`` saved tensors, given that the nodes in ``masks`` are exact.

    ``whole`` has those that `find_coefficients` has found already.
    """
    instead: dict[str, str] = {}
    refused: dict[str, str] = {}
    curved: set[str] = set()
    unknown: dict[str, str] = {}
    region = _Region(derivable_nodes(pair), masks)
    nodes = {node.name: node for node in pair.backward.graph.nodes}
    for placeholder in pair.backward.graph.find_nodes(op="placeholder"):
        name = placeholder.name
        if name not in lossy:
            continue
        end = nodes[whole[name]] if name in whole else region.last_dominator(placeholder)
        if region.bends(end):
            end = placeholder
        culprit = next(region.nonlinear(end), None)
        reader = region.unknown(end)
        if reader is not None:
            unknown[name] = str(reader.target)
        if culprit is not None:
            refused[name] = f"backward is not linear in it ({culprit.target})"
        elif end is not placeholder:
            instead[name] = end.name
        if region.is_query_or_key(end):
            curved.add(name)
    return Substitutes(instead, refused, frozenset(curved), unknown)


def find_coefficients(pair: GraphPair, lossy: frozenset[str]) -> dict[str, str]:
    """Saved tensor → the backward node that all of it passes through, decisions included, as numbers of its own.

    Stored in the tensor's place, it needs no masks beside it.
    """
    region = _Region(derivable_nodes(pair), frozenset())
    ends = {p: region.last_dominator(p) for p in pair.backward.graph.find_nodes(op="placeholder") if p.name in lossy}
    return {p.name: end.name for p, end in ends.items() if end is not p and region.is_of_numbers(p, end)}


class _Region:
    """The part of backward that forward could compute as well."""

    def __init__(self, derivable: frozenset[fx.Node], masks: frozenset[str]) -> None:
        self._derivable = derivable
        self._masks = masks

    def last_dominator(self, placeholder: fx.Node) -> fx.Node:
        """The last node of the same size through which all passes that backward reads of a saved tensor.

        The ``placeholder`` itself where there is none, or none but views and casts of it.
        """
        reached = self._closure(placeholder)
        value = placeholder.meta["val"]
        for node in sorted(reached, reverse=True):
            found = node.meta.get("val")
            if node is placeholder or not isinstance(found, torch.Tensor):
                continue
            fits = found.dtype in SOURCE_DTYPES and found.numel() == value.numel()
            if fits and not self._escapes(self._closure(placeholder, end=node), node):
                return placeholder if behind(node, REORDERS | CASTS) is placeholder else node
        return placeholder

    def is_of_numbers(self, start: fx.Node, end: fx.Node) -> bool:
        """Whether floating-point nodes alone lead from ``start`` to ``end``, too."""
        found = {start}
        for node in sorted(self._closure(start)):
            if is_float(node) and not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return end in found

    def nonlinear(self, start: fx.Node) -> Iterator[fx.Node]:
        """Operators that read ``start``, or what follows from it, beside a tangent, and are not linear in it.

        What leads to coefficients is measured.
        """
        for node in self._closure(start):
            for user in self._users(node):
                for position in NONLINEAR.get(packet_of(user), ()):
                    fits_again = position in _QUERY_AND_KEY and recomputes(user)
                    if _argument(user, position) is node and not fits_again:
                        yield user
                is_end = user not in self._derivable and is_float(node)
                if is_end and is_pointwise(user) and not is_affine(user, [node]):
                    yield user

    def bends(self, start: fx.Node) -> bool:
        """Whether backward bends in ``start``."""
        return bends(self._closure(start), start, (ATTENTION,))

    def unknown(self, start: fx.Node) -> fx.Node | None:
        """An operator that reads ``start``, or what follows from it, and may have steps and poles for all one knows."""
        return next((u for node in self._closure(start) for u in self._users(node) if not is_known(u)), None)

    def is_query_or_key(self, start: fx.Node) -> bool:
        """Whether fused attention that is computed again reads ``start`` as its query or key."""
        pairs = ((node, user) for node in self._closure(start) for user in self._users(node))
        return any(recomputes(user) and any(user.args[i] is node for i in _QUERY_AND_KEY) for node, user in pairs)

    def _closure(self, start: fx.Node, end: fx.Node | None = None) -> set[fx.Node]:
        """``start`` and the nodes of the region that depend on it, not looking behind ``end``."""
        seen, stack = {start}, [start]
        while stack:
            node = stack.pop()
            if node is end:
                continue
            new = [user for user in self._users(node) if user in self._derivable and user not in seen]
            seen.update(new)
            stack.extend(new)
        return seen

    def _escapes(self, nodes: set[fx.Node], end: fx.Node) -> bool:
        """Whether any of ``nodes`` but ``end`` is read outside the region."""
        return any(user not in self._derivable for node in nodes if node is not end for user in self._users(node))

    def _users(self, node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if user.name not in self._masks]


def _argument(node: fx.Node, position: int | str) -> object:
    if isinstance(position, str):
        return node.kwargs.get(position)
    return node.args[position] if len(node.args) > position else None
