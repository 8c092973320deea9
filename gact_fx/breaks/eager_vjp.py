"""What eager PyTorch between compiled graphs does to a gradient on its way back: a linear map, and its transpose.

Profiling follows the gradient through all graphs of a model. What autograd does between two of them is the
vector-Jacobian product (VJP) of what ran there. It is linear in the gradient, so that autograd gives its transpose as a
derivative.

The VJP is taken from autograd's nodes, called one by one: running the engine would call the user's hooks, and go on
into compiled graphs. Gradients are brought to the shape and dtype that the next node takes, as the engine does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gact_fx.breaks.forward_pass import Held
from gact_fx.codec.packed_tensors import compressed_saved_tensors
from gact_fx.graphs.autograd_graph import gradients_taken, saved_by
from gact_fx.graphs.hooks import paused

# A node and the number of one of its results: where a gradient enters it.
Entry = tuple[Node, int]


@dataclass(frozen=True)
class End:
    """Something whose gradient the VJP gives. ``of``: what `follow` was told of it, or the node of a leaf.

    ``like`` has the gradient's shape, dtype and device, and next to no memory.
    """

    of: Any
    is_leaf: bool
    like: torch.Tensor = field(repr=False)
    edge: GradientEdge = field(repr=False)


@dataclass(frozen=True)
class EagerVJP:
    """The VJP from the gradient of a tensor to the gradients of what eager PyTorch computed it from, the ``ends``."""

    ends: tuple[End, ...]
    gradient: GradientEdge = field(repr=False)
    like: torch.Tensor = field(repr=False)

    def towards(self, names: Mapping[Any, Any]) -> "EagerVJP":
        """The same with other names for what is no leaf; what has none counts as a leaf."""
        ends = (
            end if end.is_leaf else replace(end, of=names.get(end.of, end.edge.node), is_leaf=end.of not in names)
            for end in self.ends
        )
        return replace(self, ends=tuple(ends))

    def __call__(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of ``ends``, given that of the tensor."""
        # The transpose is linear in its arguments, and its own transpose is the map itself.
        given = [torch.zeros_like(end.like, requires_grad=True) for end in self.ends]
        with torch.enable_grad():
            total = self.transpose(given, differentiable=True)
        found = torch.autograd.grad(total, given, gradient.reshape(total.shape).to(total.dtype), allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(given, found, strict=True)]

    def transpose(self, slopes: Sequence[torch.Tensor | None], *, differentiable: bool = False) -> torch.Tensor:
        """The derivative with respect to the tensor's gradient, given those with respect to its ends' (None: zeros).

        ``differentiable``: so that autograd can differentiate it in turn.
        """
        pairs = [
            (end.edge, slope.reshape(end.like.shape).to(end.like.dtype))
            for end, slope in zip(self.ends, slopes, strict=True)
            if slope is not None
        ]
        if not pairs:
            return torch.zeros_like(self.like)
        edges, weights = zip(*pairs, strict=True)
        (found,) = torch.autograd.grad(
            edges, [self.gradient], weights, retain_graph=True, create_graph=differentiable, allow_unused=True
        )
        return torch.zeros_like(self.like) if found is None else found


def follow(x: torch.Tensor, made: Mapping[Entry, Any]) -> EagerVJP | None:
    """The VJP from ``x`` back to the results in ``made`` of compiled graphs and to leaves.

    None where it cannot be known, or not without touching the user's program: a custom ``autograd.Function`` on the
    way, whose backward may do anything; other saved-tensor hooks than gact_fx's, checkpointing say; an operator without
    a second derivative; sparse gradients; what was written to since. Hooks on tensors are taken to leave gradients as
    they are.
    """
    assert x.grad_fn is not None
    start = (x.grad_fn, x.output_nr)
    order = _in_order(start, made)
    if order is None:
        return None
    try:
        with paused(), torch.enable_grad(), compressed_saved_tensors(), torch.autocast(x.device.type, enabled=False):
            gradient = torch.zeros_like(x, requires_grad=True)
            found = _pull(start, gradient, order)
            if any(g.layout is not torch.strided for g in found.values()):
                return None
            ends = tuple(
                End(made.get(entry, entry[0]), entry not in made, _like(g), get_gradient_edge(g))
                for entry, g in found.items()
                if g.requires_grad
            )
            vjp = EagerVJP(ends, get_gradient_edge(gradient), _like(x))
            # Some operators refuse only here.
            vjp.transpose([torch.zeros_like(end.like) for end in ends])
    except RuntimeError:
        return None
    return vjp if ends else None


def _in_order(start: Entry, made: Mapping[Entry, Any]) -> list[Node] | None:
    """The nodes behind ``start`` and before all ends, each after those that it gets gradients from."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Entry, bool]] = [(start, False)]
    while stack:
        entry, is_done = stack.pop()
        node = entry[0]
        if is_done:
            order.append(node)
        elif entry not in made and node not in seen:
            if isinstance(node, BackwardCFunction) or node.name() == "CopySlices":
                return None
            if hasattr(node, "variable"):
                continue
            if any(not isinstance(saved, Held | torch.Tensor | None) for _, saved in saved_by(node)):
                return None
            seen.add(node)
            stack.append((entry, True))
            stack += [((following, number), False) for following, number in node.next_functions if following]
    return order[::-1]


def _pull(start: Entry, gradient: torch.Tensor, order: Sequence[Node]) -> dict[Entry, torch.Tensor]:
    """Backward from ``start`` through the nodes in ``order``; the gradients that arrive where these end."""
    arrived = {start: gradient}
    for node in order:
        call: Any = node
        given = [arrived.pop((node, number), None) for number in range(len(gradients_taken(node)))]
        if all(g is None for g in given):
            continue
        results = call(*given)
        results = results if isinstance(results, tuple) else (results,)
        for (following, number), result in zip(node.next_functions, results, strict=True):
            if following is not None and result is not None:
                result = _as_expected(result, following, number)
                known = arrived.get((following, number))
                arrived[following, number] = result if known is None else known + result
    return arrived


def _as_expected(gradient: torch.Tensor, node: Any, number: int) -> torch.Tensor:
    """A gradient as ``node`` takes it: operators leave it to the engine to undo broadcasting and promotion."""
    expected = gradients_taken(node)[number]
    if gradient.is_complex() and not expected.dtype.is_complex:
        gradient = gradient.real
    return gradient.sum_to_size(tuple(expected.shape)).to(expected.dtype)


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)
