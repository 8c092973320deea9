"""What eager PyTorch between compiled graphs does to a gradient on its way back: a linear map, and its transpose.

Profiling follows the gradient through all graphs of a model. What autograd does between two of them is the
vector-Jacobian product (VJP) of what ran there; it is linear in the gradient, so that autograd, which can record it,
gives its transpose as a derivative.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from gact_fx.eager_regions import paused
from gact_fx.saved_tensors import compressed_saved_tensors

# A node and the number of one of its results: where a gradient enters it.
Entry = tuple[Node, int]


@dataclass(frozen=True)
class EagerVJP:
    """The VJP from the gradient of a tensor to the gradients of what eager PyTorch computed it from.

    ``ends`` says what these are, in order: what `follow` was told of them, None for leaves. ``_results`` were computed
    from ``_gradient``, whose value means nothing.
    """

    ends: tuple[Any, ...]
    _gradient: torch.Tensor
    _results: tuple[torch.Tensor | None, ...]

    def towards(self, names: Mapping[Any, Any]) -> EagerVJP:
        """The same with other names for its ends; those that have none get no gradient."""
        known = [end is None or end in names for end in self.ends]
        results = tuple(r if is_known else None for r, is_known in zip(self._results, known, strict=True))
        return replace(self, ends=tuple(names.get(end) for end in self.ends), _results=results)

    def shapes(self) -> list[torch.Tensor | None]:
        """Tensors like the gradients of ``ends``, None where nothing reaches one."""
        return list(self._results)

    def transpose(self, slopes: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The derivative with respect to the tensor's gradient, given those with respect to its ends' (None: zeros)."""
        return self._transpose(slopes, False)

    def __call__(self, gradient: torch.Tensor) -> list[torch.Tensor | None]:
        """The gradients of ``ends``, given that of the tensor."""
        # The transpose is linear in its arguments, and its own transpose is the map itself.
        given = [None if r is None else torch.zeros_like(r, requires_grad=True) for r in self._results]
        wanted = [x for x in given if x is not None]
        with torch.enable_grad():
            total = self._transpose(given, True)
        like = gradient.reshape(total.shape).to(total.dtype)
        found = iter(torch.autograd.grad(total, wanted, like, allow_unused=True))
        return [None if x is None else next(found) for x in given]

    def _transpose(self, slopes: Sequence[torch.Tensor | None], record: bool) -> torch.Tensor:
        pairs = [
            (result, slope.reshape(result.shape).to(result.dtype))
            for result, slope in zip(self._results, slopes, strict=True)
            if result is not None and slope is not None
        ]
        if not pairs:
            return torch.zeros_like(self._gradient, requires_grad=False)
        results, weights = zip(*pairs, strict=True)
        with compressed_saved_tensors() if not record else torch.enable_grad():
            (found,) = torch.autograd.grad(results, self._gradient, weights, retain_graph=True, create_graph=record)
        return found


def follow(x: torch.Tensor, made: Mapping[Entry, Any]) -> EagerVJP | None:
    """The VJP from ``x`` back to the results in ``made`` of compiled graphs and to leaves.

    None where autograd cannot say: a custom ``autograd.Function`` on the way, whose backward may do anything; an
    operator without a second derivative; what was written to since; a compiled graph on the way from another's result.
    """
    found = _ends(x, made)
    if found is None:
        return None
    entries = list(found)
    edges = [GradientEdge(*entry) for entry in entries]
    with paused(), torch.enable_grad(), compressed_saved_tensors():
        gradient = torch.zeros_like(x, requires_grad=True)
        try:
            results = torch.autograd.grad(x, edges, gradient, create_graph=True, allow_unused=True)
        except RuntimeError:
            # Not differentiable, freed, or changed in place.
            return None
    # What is no function of the gradient any more has lost it in an operator that nobody can differentiate twice.
    if any(r is not None and not r.requires_grad for r in results):
        return None
    return EagerVJP(tuple(made.get(entry) for entry in entries), gradient, results)


def _ends(x: torch.Tensor, made: Mapping[Entry, Any]) -> dict[Entry, None] | None:
    """Where the gradient of ``x`` enters compiled graphs and leaves, None where it cannot be followed."""
    ends: dict[Entry, None] = {}
    seen: set[Hashable] = set()
    assert x.grad_fn is not None
    stack: list[Entry] = [(x.grad_fn, x.output_nr)]
    while stack:
        entry = stack.pop()
        node = entry[0]
        if entry in made or hasattr(node, "variable"):
            ends[entry] = None
        elif isinstance(node, BackwardCFunction):
            return None
        elif node not in seen:
            seen.add(node)
            stack += _following(node)
    graphs = {node for node, _ in ends if isinstance(node, BackwardCFunction)}
    # Autograd would run a graph that lies on the way to another end.
    return None if graphs & set(_behind(graphs)) else ends


def _behind(nodes: set[Node]) -> Iterator[Node]:
    """All nodes that the gradient reaches from ``nodes``."""
    seen: set[Node] = set()
    stack = [following for node in nodes for following, _ in _following(node)]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack += [following for following, _ in _following(node)]


def _following(node: Node) -> list[Entry]:
    return [(following, number) for following, number in node.next_functions if following is not None]
