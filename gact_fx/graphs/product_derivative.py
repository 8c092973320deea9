"""A product of two tensors with a derivative that has one tensor fewer in memory than PyTorch's.

PyTorch's reads both factors and makes both derivatives in one step: with the derivative that arrives these are five
tensors, where saved factors are codes that are decompressed when they are read. Here the derivative by one factor is
made, and the other factor freed, before that by the other factor is made.
"""

from typing import Any

import torch


def differentiable_product(a: Any, b: Any) -> Any:
    """``a * b`` for two tensors, or a tensor and a number."""
    factors = [x for x in (a, b) if isinstance(x, torch.Tensor) and x.requires_grad and x.is_floating_point()]
    if len(factors) < 2 or a.shape != b.shape or a.dtype != b.dtype:
        return torch.mul(a, b)
    by_first = _ByFirst.apply(a, b.detach())  # type: ignore[no-untyped-call]
    return _BySecond.apply(by_first, b, a.detach())  # type: ignore[no-untyped-call]


class _ByFirst(torch.autograd.Function):
    """The product, as a function of its first factor alone."""

    @staticmethod
    def forward(ctx: Any, factor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(other)
        return factor * other

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None]:
        return slope * ctx.saved_tensors[0], None


class _BySecond(torch.autograd.Function):
    """What is a product with the second factor already, as a function of that as well."""

    @staticmethod
    def forward(ctx: Any, product: torch.Tensor, factor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(other)
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return slope, slope * ctx.saved_tensors[0], None
