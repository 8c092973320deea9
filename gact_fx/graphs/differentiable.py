"""Runs the operators of a backward graph so that autograd can differentiate them, and says where it cannot.

Private, tried with torch 2.11 and 2.13: the names of autograd's nodes that stand for a missing derivative
("NotImplemented", "NotSupported", "GeneratedBackwardFor"; public would be a way to ask an operator whether it has one).
"""

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import fx

from gact_fx.graphs.interpreter import GraphInterpreter
from gact_fx.graphs.operators import name_of
from gact_fx.graphs.trees import tree_leaves, tree_map

aten = torch.ops.aten
# Operators that take no more than the shape of a tensor (copy: of the one that is written to), and rightly have no
# derivative by it.
_SHAPE_ONLY = (
    "full_like", "zeros_like", "ones_like", "empty_like",
    "new_zeros", "new_full", "new_ones", "new_empty", "new_empty_strided", "copy",
)  # fmt: skip


def _extreme(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """amax or amin with the derivative of one of the largest: theirs compares values, which may be kept rounded."""
    x, dims, keepdim = args[0], args[1] if len(args) > 1 else [], len(args) > 2 and args[2]
    if kwargs or len(dims) != 1:
        found: torch.Tensor = target(*args, **kwargs)
        return found
    extreme = torch.max if target is aten.amax.default else torch.min
    return extreme(x, dims[0], keepdim).values


_EXTREMES: dict[Any, Any] = {aten.amax.default: _extreme, aten.amin.default: _extreme}


class DifferentiableInterpreter(GraphInterpreter):
    """A `GraphInterpreter` that calls single nodes and checks their derivatives."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, differentiable=True)

    def call(
        self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], *, doubtful: bool = False
    ) -> tuple[Any, bool]:
        """The node's result, and whether autograd can go through it; where not, it is detached.

        ``doubtful``: compute the derivative of every operator to find out, not only of those known for refusing.
        """
        run = _EXTREMES.get(node.target, getattr(self, node.op))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not inputs or not torch.is_grad_enabled():
            return run(node.target, args, kwargs), True
        try:
            result = run(node.target, args, kwargs)
        except RuntimeError:
            # Some operators already refuse arguments that require a gradient; any other error comes again.
            return run(node.target, *tree_map(_detached, (args, kwargs))), False
        is_exact = node.target is getitem or str(node.target) in self._calls
        if node.op == "call_function" and _ends_derivative(node, inputs, result, doubtful, is_exact):
            return tree_map(_detached, result), False
        return result, True


def has_derivative(x: Any) -> bool:
    """Whether ``x`` is a tensor of a dtype that autograd differentiates."""
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


def _ends_derivative(node: fx.Node, inputs: list[torch.Tensor], result: Any, doubtful: bool, is_exact: bool) -> bool:
    """Whether autograd cannot go through what was called, or would silently stop there.

    ``is_exact``: a result without a derivative does depend on none of the ``inputs``, as where other operators were
    called in the node's place.
    """
    values = [x for x in tree_leaves(result) if has_derivative(x)]
    if any(x.grad_fn is not None and _refuses(x, inputs, doubtful) for x in values):
        return True
    stops = not is_exact and any(not x.requires_grad for x in values)
    return stops and name_of(node.target) not in _SHAPE_ONLY


def _refuses(result: torch.Tensor, inputs: list[torch.Tensor], doubtful: bool) -> bool:
    """Whether the derivative of a result cannot be computed, which some operators only say when it is."""
    assert result.grad_fn is not None
    name = result.grad_fn.name()
    if "NotImplemented" in name or "NotSupported" in name:
        return True
    if not doubtful and not name.startswith("GeneratedBackwardFor"):
        return False
    try:
        torch.autograd.grad(result, inputs, torch.ones_like(result), retain_graph=True, allow_unused=True)
    except RuntimeError:
        return True
    return False


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, value: torch.Tensor, take: Callable[[torch.Tensor], None]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.take = take
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor | None) -> Any:
        if slope is not None:
            ctx.take(slope)
        return None, None, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, give: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.give = give
        return torch.zeros((), device=value.device)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        return ctx.give(), None


class Derivative:
    """Autograd's graph from values that it begins with to values that it ends with.

    The derivative by each of the former is given away as soon as it is there, and by each of the latter asked for when
    it is needed. `torch.autograd.grad` would hold all of them until it ends.
    """

    def __init__(self) -> None:
        # What autograd is to derive by, so that it goes to all beginnings.
        self._token = torch.zeros((), requires_grad=True)
        self._ends: list[torch.Tensor] = []

    def begin(self, value: torch.Tensor, take: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """``value``, to begin with; ``take`` gets the derivative by it, where there is one."""
        begun: torch.Tensor = _Begin.apply(self._token, value, take)  # type: ignore[no-untyped-call]
        return begun

    def end(self, value: torch.Tensor, give: Callable[[], torch.Tensor]) -> None:
        """End with ``value``, which depends on a beginning; ``give`` says the derivative by it."""
        self._ends.append(_End.apply(value, give))  # type: ignore[no-untyped-call]

    def run(self, *, again: bool) -> None:
        """Go back from the ends to the beginnings; ``again``: not for the last time."""
        if self._ends:
            ones = [torch.ones_like(end) for end in self._ends]
            torch.autograd.grad(self._ends, self._token, ones, retain_graph=again, allow_unused=True)
