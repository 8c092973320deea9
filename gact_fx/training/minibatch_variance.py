"""How much the gradient varies from minibatch to minibatch, by the gradients of sample batches."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from gact_fx.breaks.autograd_nodes import nodes_of
from gact_fx.codec.packed_tensors import compressed_saved_tensors
from gact_fx.errors import first_line
from gact_fx.graphs.trees import tree_leaves, tree_map
from gact_fx.profiling.gradients import are_finite, sketch, squared_norm
from gact_fx.training.session import log

LossFunction = Callable[[Any, Any], torch.Tensor]
Gradients = dict[torch.Tensor, torch.Tensor]
# Gives a context in which the model runs as it was before compilation; `with` gives the model.
Uncompiled = Callable[[], contextlib.AbstractContextManager[Any]]


class Moments:
    """Mean and total variance of tensors that come one by one, as precise as these are (Welford's method)."""

    def __init__(self, like: torch.Tensor) -> None:
        self._count = 0
        self.mean = torch.zeros_like(like)
        self._squares = 0.0

    def add(self, value: torch.Tensor | float) -> None:
        self._count += 1
        ahead = value - self.mean
        self.mean += ahead / self._count
        self._squares += squared_norm(ahead) * (self._count - 1) / self._count

    @property
    def variance(self) -> float | None:
        """The unbiased estimate, summed over elements; None for fewer than two tensors."""
        return self._squares / (self._count - 1) if self._count > 1 else None


class Spread:
    """The moments of all leaves' gradients, by their sketches."""

    def __init__(self) -> None:
        self._moments: dict[torch.Tensor, Moments] = {}

    def add(self, gradients: Gradients) -> None:
        """Add a batch's gradients; one that reaches other leaves than the first is left out."""
        if not self._moments:
            self._moments = {leaf: Moments(value) for leaf, value in gradients.items()}
        if gradients.keys() == self._moments.keys():
            for leaf, value in gradients.items():
                self._moments[leaf].add(value)

    @property
    def mean(self) -> Gradients:
        return {leaf: moments.mean for leaf, moments in self._moments.items()}

    def variance(self) -> float | None:
        """In total; None for fewer than two batches."""
        known = [moments.variance for moments in self._moments.values() if moments.variance is not None]
        return sum(known) if known else None


def gradients_of(loss: torch.Tensor) -> Gradients:
    """What ``loss.backward()`` would give the leaves, by leaf: their order depends on the compiler."""
    # What a custom function calls a variable is its own business.
    nodes = (node for node in nodes_of(loss, ()) if not isinstance(node, BackwardCFunction))
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    # Not loss.backward(), which would write .grad.
    found = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ()
    return {leaf: gradient for leaf, gradient in zip(leaves, found, strict=True) if gradient is not None}


def sketches_of(loss: torch.Tensor) -> Gradients:
    """The sketches of `gradients_of`, which keep norms and take next to no memory."""
    return {leaf: sketch(gradient) for leaf, gradient in gradients_of(loss).items()}


def variance_by_halves(uncompiled: Uncompiled, batch: Any, loss_fn: LossFunction, whole: Gradients) -> float | None:
    """The variance of the gradient over batches, from two halves of one; None where the batch cannot be halved.

    The halves' gradients g and h vary by ``|g - h|^2 / 2``; that of their mean by half as much, that of their sum (a
    loss that sums over rows) by twice as much. They run as eager PyTorch does, and what they save in 8 bits.
    """
    try:
        halves = _halves(batch)
        if halves is None:
            return None
        with uncompiled() as model, compressed_saved_tensors():
            first, second = (sketches_of(loss_fn(model, half)) for half in halves)
    except Exception as error:
        # A batch need not make sense in halves; then only the warning about noise is lost.
        log.info("how the gradient varies is not known: half a batch failed with %s", first_line(error))
        return None
    if not first.keys() == second.keys() == whole.keys() or not are_finite([*first.values(), *second.values()]):
        return None
    squares = _squares(first, second)
    sums = {key: value + second[key] for key, value in first.items()}
    is_mean = _squares({key: value / 2 for key, value in sums.items()}, whole) <= _squares(sums, whole)
    return squares / 4 if is_mean else squares


def _squares(left: Gradients, right: Gradients) -> float:
    return sum(squared_norm(value - right[key]) for key, value in left.items())


def _halves(batch: Any) -> tuple[Any, Any] | None:
    """The batch cut in two along the first dimension of its tensors, None where they do not agree on it."""
    tensors = [x for x in tree_leaves(batch) if isinstance(x, torch.Tensor) and x.dim()]
    rows = {x.shape[0] for x in tensors}
    if len(rows) != 1 or min(rows) < 2:
        return None
    middle = rows.pop() // 2

    def part(start: int) -> Any:
        return tree_map(lambda x: x[start : start + middle] if isinstance(x, torch.Tensor) and x.dim() else x, batch)

    return part(0), part(middle)
