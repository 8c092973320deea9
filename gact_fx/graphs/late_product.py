"""A gradient for what a graph returns of a linear layer, for the rare caller who wants one.

Autograd gives a compiled graph zeros for every result that nobody differentiates, as large as the result. Logits of a
language model, returned beside the loss, are therefore returned without a gradient, together with what they were
computed from; autograd asks for their derivative only where there is one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gact_fx.graphs.linear_cross_entropy import scale_, slope_at


@dataclass(frozen=True)
class LateProduct:
    """Result ``output`` of a graph is ``linear(hidden, weight, bias)``, and has no gradient.

    All are positions: ``hidden`` among the results, of which it is one too many, ``weight`` and ``bias`` among inputs.
    The result may be ``scale`` times as much, and capped, as in `gact_fx.graphs.linear_cross_entropy`.
    """

    output: int
    hidden: int
    weight: int
    bias: int | None
    scale: float = 1.0
    cap: float = 0.0


def with_late_products(run: Callable[..., Any], late: Sequence[LateProduct]) -> Callable[..., Any]:
    """``run``, a compiled graph, whose ``late`` results have their gradients, and which returns no more than before."""
    if not late:
        return run
    count = min(each.hidden for each in late)

    def call(*args: Any) -> Any:
        results = list(run(*args))
        for each in late:
            bias = None if each.bias is None else args[each.bias]
            of = results[each.hidden], args[each.weight], bias, each.scale, each.cap
            results[each.output] = _Late.apply(results[each.output], *of)  # type: ignore[no-untyped-call]
        return tuple(results[:count])

    return call


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        found: torch.Tensor,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scale: float,
        cap: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.scale, ctx.cap = scale, cap
        # Not a view, which nobody could write to.
        return found.data

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        result = gradient
        if ctx.cap:
            # Computed again: the result itself would live as long as this may be asked for.
            before = F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))
            result = scale_(before.to(gradient.dtype), ctx.scale, ctx.cap)
        slope = slope_at(result, ctx.scale, ctx.cap)
        gradient = gradient if slope is None else gradient * slope
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_hidden = of_weight = of_bias = None
        if ctx.needs_input_grad[1]:
            of_hidden = (gradient @ weight.to(gradient.dtype)).to(hidden.dtype)
        if ctx.needs_input_grad[2]:
            read = hidden.reshape(-1, hidden.shape[-1]).to(gradient.dtype)
            of_weight = (rows.t() @ read).to(weight.dtype)
        if ctx.needs_input_grad[3]:
            of_bias = rows.sum(0).to(bias.dtype)
        return None, of_hidden, of_weight, of_bias, None, None
