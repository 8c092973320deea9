"""The derivative of a convolution's backward pass is that of PyTorch."""

from typing import Any

import pytest
import torch

from gact_fx.graphs.convolution_derivative import differentiable_convolution_backward

aten = torch.ops.aten

# Sizes of the input, channels in and out, kernel, stride, padding, dilation, whether it is transposed, groups.
CASES = [
    ((16,), 4, 6, 3, 1, 1, 1, False, 1),
    ((9, 10), 4, 6, 3, 1, 1, 1, False, 1),
    ((9, 10), 4, 6, 3, 2, 1, 1, False, 1),
    ((9, 10), 4, 6, 3, 1, 2, 2, False, 2),
    ((9, 10), 4, 4, 3, 1, 1, 1, False, 4),
    ((5, 6), 4, 6, 3, 2, 1, 1, True, 1),
    ((4, 5, 6), 2, 4, 2, 1, 0, 1, False, 1),
]


@pytest.mark.parametrize("mask", [[True, True, True], [False, True, False], [True, False, False]], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_pytorchs(case: Any, mask: list[bool]) -> None:
    size, inside, outside, kernel, step, pad, gap, transposed, groups = case
    torch.manual_seed(0)
    dims, none = len(size), [0] * len(size)
    options: dict[str, Any] = {"dtype": torch.float64, "requires_grad": True}
    x = torch.randn(3, inside, *size, **options)
    channels = (inside, outside // groups) if transposed else (outside, inside // groups)
    weight = torch.randn(*channels, *[kernel] * dims, **options)
    how = ([step] * dims, [pad] * dims, [gap] * dims, transposed, none, groups)
    gradient = torch.randn_like(aten.convolution(x, weight, None, *how)).requires_grad_()
    arguments = (gradient, x, weight, [outside], *how, mask)
    expected, found = aten.convolution_backward(*arguments), differentiable_convolution_backward(*arguments)
    # PyTorch gives an undefined tensor as None.
    slopes = [torch.randn_like(y) for y, asked in zip(expected, mask, strict=True) if asked]
    derivatives = []
    for results in (expected, found):
        asked = [y for y, is_asked in zip(results, mask, strict=True) if is_asked]
        derivatives.append(torch.autograd.grad(asked, [gradient, x, weight], slopes, allow_unused=True))
    for a, b in zip(expected, found, strict=True):
        assert b is None or torch.equal(a, b)
    for a, b in zip(*derivatives, strict=True):
        torch.testing.assert_close(torch.zeros(1) if a is None else a, torch.zeros(1) if b is None else b)
