"""Products have PyTorch's derivatives, in less memory."""

from collections.abc import Callable

import pytest
import torch
from peak_bytes import peak_bytes

from gact_fx.codec.packed_tensors import compressed_saved_tensors
from gact_fx.graphs.product_derivative import differentiable_product

SHAPE = (512, 1024)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize(
    "product",
    [
        lambda times, a, b: times(a, b),
        lambda times, a, b: times(a, a),
        lambda times, a, b: times(times(a, b), times(b, a)),
        lambda times, a, b: times(a, b[:1]),
        lambda times, a, b: times(a, b.detach()),
        lambda times, a, b: times(a, 3.0),
        lambda times, a, b: times(a, b.float() if b.dtype is torch.bfloat16 else b.to(torch.complex64)),
    ],
)
def test_derivatives_are_those_of_pytorch(product: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    a, b = (torch.randn(6, 5, dtype=dtype, requires_grad=True) for _ in range(2))
    expected, found = product(torch.mul, a, b), product(differentiable_product, a, b)
    assert found.equal(expected)
    slope = torch.randn_like(expected)
    first, second = (torch.autograd.grad(x, (a, b), slope, allow_unused=True) for x in (expected, found))
    for x, y in zip(first, second, strict=True):
        assert x is y is None or torch.equal(x, y)


def test_four_tensors_are_there_at_a_time() -> None:
    """Both derivatives, the one that arrives, and one factor; PyTorch has both factors."""
    a, b = (torch.randn(SHAPE, requires_grad=True) for _ in range(2))

    def peak(times: Callable[..., torch.Tensor]) -> float:
        def loss() -> torch.Tensor:
            with compressed_saved_tensors():
                # What is kept of the factors is no leaf, and so in codes.
                return times(a.view_as(a), b.view_as(b)).sum(0).square().sum()

        return peak_bytes(loss).backward / a.nbytes

    found, usual = peak(differentiable_product), peak(torch.mul)
    assert usual > 3.9
    assert found < usual - 0.9
