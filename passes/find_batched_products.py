"""Find the batched matrix products that backward computes again at no cost in memory, such as attention's output.

The gradient of a batched product reads both of its factors, so backward has these anyway: probabilities and values. Its
result need not be saved for the layer behind it, where that reads it for the gradient of its weight alone.
"""

from collections.abc import Collection, Sequence

import torch
from torch import fx

from gact_fx.graphs.edit import numel, readers
from gact_fx.graphs.operator_table import CASTS, REORDERS
from gact_fx.graphs.operators import packet_of
from gact_fx.graphs.sizes import hint

aten = torch.ops.aten

_PRODUCTS = (aten.mm, aten.bmm)


def find_batched_products(forward: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """The nodes of ``forward``, the part of a joint graph before the tangents, that are to be computed again.

    In backward only matrix products read them, none of which takes less time than the node itself: nothing then depends
    on their rounding but linearly, and a step hardly takes longer.
    """
    inside = set(forward)
    return frozenset(node for node in forward if packet_of(node) is aten.bmm and _is_found(node, inside))


def _is_found(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    found = _readers(node, inside)
    if not found or any(packet_of(reader) not in _PRODUCTS or _work(reader) < _work(node) for reader in found):
        return False
    return all(any(packet_of(r) is aten.bmm for r in _readers(factor, inside)) for factor in node.all_input_nodes)


def _readers(node: fx.Node, inside: Collection[fx.Node]) -> list[fx.Node]:
    """What reads ``node`` in backward, or what is the same in another order or dtype."""
    return [reader for reader in readers(node, REORDERS | CASTS) if reader not in inside]


def _work(product: fx.Node) -> int:
    """Multiply-adds on the traced batch."""
    return numel(product) * hint(product.all_input_nodes[0].meta["val"].shape[-1])
