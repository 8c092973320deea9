"""Where chosen elements of a saved tensor lie in what follows from it, by operators that compute or move elements."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from gact_fx.graphs.edit import ancestors, numel
from gact_fx.graphs.linearity import is_pointwise
from gact_fx.graphs.operator_table import MOVES, RESHAPES
from gact_fx.graphs.operators import packet_of

aten = torch.ops.aten
# These go by where elements lie in memory, and by rows.
_BY_MEMORY = frozenset({aten.as_strided, aten.embedding})
Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Elements:
    """Elements of a node's value that follow from chosen elements of a chain's start.

    ``positions`` are flat ones in the value's ``shape``. ``origins`` has for each the number of the chosen element that
    it follows from, None where they are those of the start in their order; ``taken`` is the same for the value that a
    move reads.
    """

    shape: torch.Size
    positions: Tensor
    origins: Tensor | None = None
    taken: Tensor | None = None


def between(start: fx.Node, nodes: Collection[fx.Node], ends: Sequence[fx.Node]) -> list[fx.Node]:
    """Those of ``nodes`` by which ``ends`` follow from ``start``, in order."""
    needed = ancestors(ends, lambda node: node is start or node not in nodes)
    return [node for node in sorted(needed) if node in nodes and node is not start]


def is_elementwise(start: fx.Node, nodes: Collection[fx.Node], ends: Sequence[fx.Node]) -> bool:
    """Whether every element of an end follows from one element of the start at most."""
    # By node, the moves that its elements have made: those of two tensors that meet must have made the same.
    routes: dict[fx.Node, tuple[fx.Node, ...]] = {start: ()}
    for node in between(start, nodes, ends):
        inside = [i for i in node.all_input_nodes if i in routes]
        found = {routes[i] for i in inside}
        if len(found) != 1:
            return False
        is_complete = is_pointwise(node) and all(numel(i) == numel(node) for i in inside)
        if not (keeps_order(node) or is_complete or is_move(node)) or (is_move(node) and len(inside) > 1):
            return False
        routes[node] = (*found.pop(), *[node] * is_move(node))
    return True


def keeps_order(node: fx.Node) -> bool:
    """Whether a node has the elements of its input in the same order."""
    # Sizes that vary are expanded to what they are.
    is_expansion = packet_of(node) is aten.expand and numel(node) == numel(node.all_input_nodes[0])
    return packet_of(node) in RESHAPES or is_expansion


def is_move(node: fx.Node) -> bool:
    """Whether a node has elements of its inputs in other places, or several times, or some of them."""
    is_known = packet_of(node) in MOVES - _BY_MEMORY or node.target is getitem
    # A padding of zeros follows from no element.
    is_filled = packet_of(node) is aten.constant_pad_nd and bool([*node.args[2:], *node.kwargs.values(), 0][0])
    return is_known and not is_filled and not keeps_order(node) and not is_pointwise(node)


def follow(
    start: fx.Node,
    chain: Sequence[fx.Node],
    shape: torch.Size,
    positions: Tensor,
    outside: Mapping[fx.Node, Any],
    call: Call,
) -> dict[fx.Node, Elements]:
    """Where the elements of ``start``, a tensor of ``shape``, at flat ``positions`` lie in each node of an elementwise
    ``chain``; ``outside`` has the values of what else its moves read."""
    found: dict[fx.Node, Any] = {start: Elements(shape, positions)}
    for node in chain:
        source = next(i for i in node.all_input_nodes if i in found)
        before = found[source]
        if node.target is getitem:
            found[node] = before[node.args[1]]
        elif is_move(node):
            found[node] = _moved(node, source, before, outside, call)
        else:
            shape = before.shape
            if keeps_order(node):
                values = {**outside, source: torch.empty(shape, device="meta")}
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                shape = call(node.target, args, kwargs).shape
            found[node] = Elements(shape, before.positions, before.origins)
    return {node: elements for node, elements in found.items() if isinstance(elements, Elements)}


def moves_read(chain: Sequence[fx.Node], start: fx.Node) -> set[fx.Node]:
    """What moves and reshapes of a ``chain`` read that is not of it."""
    inside = {start, *chain}
    return {i for node in chain if is_move(node) or keeps_order(node) for i in node.all_input_nodes if i not in inside}


def _moved(node: fx.Node, source: fx.Node, before: Elements, outside: Mapping[fx.Node, Any], call: Call) -> Any:
    """What ``node`` does to a tensor that has at the chosen places their numbers, from one on, and zeros elsewhere."""
    numbers = before.positions.new_zeros(before.shape, dtype=torch.int32)
    count = len(before.positions)
    numbers.view(-1)[before.positions] = torch.arange(1, count + 1, dtype=torch.int32, device=numbers.device)

    def read(i: fx.Node) -> Any:
        value = numbers if i is source else outside[i]
        # What is joined to the elements.
        return torch.zeros_like(value, dtype=torch.int32) if _is_float(value) else value

    args, kwargs = fx.map_arg((node.args, node.kwargs), read)
    result = call(node.target, args, kwargs)
    parts = [_found(part, before) for part in (result if isinstance(result, (tuple, list)) else [result])]
    return parts if isinstance(result, (tuple, list)) else parts[0]


def _found(numbers: Tensor, before: Elements) -> Elements:
    flat = numbers.reshape(-1)
    positions = flat.nonzero().squeeze(-1).int()
    taken = flat[positions] - 1
    origins = taken if before.origins is None else before.origins[taken]
    return Elements(numbers.shape, positions, origins, taken)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
