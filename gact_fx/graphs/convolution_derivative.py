"""The derivative of a convolution's backward pass, as three convolutions.

A convolution is bilinear. With ``C_w x`` for the convolution of x with w, backward gives ``C_w^T g``, and the gradient
of ``<g, C_w x>`` by w. The derivative of these along u and v is ``C_w u + C_v x`` by g, ``C_v^T g`` by x, and by w the
gradient of ``<g, C_w u>``: a convolution or two, and halves of two backward passes. PyTorch's own derivative computes
the last two by convolutions with as many groups as there are rows, in several times the time and memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor, bias: Any, how: tuple[Any, ...], mask: Sequence[bool]
    ) -> Any:
        ctx.save_for_backward(gradient, x, weight)
        ctx.set_materialize_grads(False)
        ctx.how = how
        return aten.convolution_backward(gradient, x, weight, bias, *how, mask)

    @staticmethod
    def backward(ctx: Any, by_x: Tensor | None, by_weight: Tensor | None, by_bias: Tensor | None) -> Any:
        gradient, x, weight = ctx.saved_tensors
        found: list[Tensor | None] = [None] * 3
        parts = []
        if by_x is not None:
            parts.append(aten.convolution(by_x, weight, None, *ctx.how))
            if ctx.needs_input_grad[2]:
                found[2] = aten.convolution_backward(gradient, by_x, weight, None, *ctx.how, [False, True, False])[1]
        if by_weight is not None:
            parts.append(aten.convolution(x, by_weight, None, *ctx.how))
            if ctx.needs_input_grad[1]:
                found[1] = aten.convolution_backward(gradient, x, by_weight, None, *ctx.how, [True, False, False])[0]
        if by_bias is not None:
            parts.append(by_bias.reshape(-1, *[1] * (gradient.dim() - 2)).expand_as(gradient))
        if parts and ctx.needs_input_grad[0]:
            found[0] = parts[0] if len(parts) == 1 else sum(parts[1:], parts[0])
        return *found, None, None, None


def differentiable_convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Any, *rest: Any
) -> tuple[Tensor | None, ...]:
    """``aten.convolution_backward``, whose arguments it takes, with the derivative above."""
    *how, mask = rest
    run: Any = _Backward.apply
    found: tuple[Tensor | None, ...] = run(gradient, x, weight, bias, tuple(how), mask)
    return found
