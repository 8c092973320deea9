"""The operator for the gradient of a convolution's input gives what PyTorch's own operator gives, but for rounding."""

from typing import Any

import pytest
import torch
from conftest import relative_error
from torch.library import opcheck

from gact_fx.graphs import convolution_gradient as module

aten = torch.ops.aten
operator = torch.ops.gact_fx.convolution_gradient.default

# Sizes of the input, kernel, stride, padding, dilation, whether it is a transposed convolution.
CASES = [
    ((32,), 3, 1, 1, 1, False),
    ((33,), 5, 2, 2, 1, False),
    ((16, 17), 3, 1, 1, 1, False),
    ((16, 17), 3, 2, 1, 1, False),
    ((16, 19), 1, 2, 0, 1, False),
    ((16, 17), 3, 1, 2, 2, False),
    ((16, 17), 2, 3, 0, 1, False),
    ((8, 9), 3, 2, 1, 1, True),
    ((6, 7, 5), 3, 2, 1, 1, False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_gradient(case: Any, channels_last: bool, dtype: torch.dtype) -> None:
    size, kernel, step, pad, gap, transposed = case
    dims = len(size)
    if channels_last and dims == 1:
        pytest.skip("there is no such memory format of one dimension")
    memory_format = (
        {2: torch.channels_last, 3: torch.channels_last_3d}[dims] if channels_last else torch.contiguous_format
    )
    torch.manual_seed(0)
    x = torch.randn(2, 16, *size, dtype=dtype).contiguous(memory_format=memory_format)
    channels = (16, 32) if transposed else (32, 16)
    weight = torch.randn(*channels, *[kernel] * dims, dtype=dtype)
    stride, padding, dilation, none = [step] * dims, [pad] * dims, [gap] * dims, [0] * dims
    result = aten.convolution(x, weight, None, stride, padding, dilation, transposed, none, 1)
    gradient = torch.randn_like(result)
    mask = [True, False, False]
    how = (stride, padding, dilation, transposed, none, 1)
    expected = aten.convolution_backward(gradient, x, weight, [32], *how, mask)[0]
    shortest = [(m - 1) * step - 2 * pad + gap * (kernel - 1) + 1 for m in result.shape[2:]]
    longer = none if transposed else [n - m for n, m in zip(size, shortest, strict=True)]
    arguments = (gradient, weight, stride, padding, dilation, transposed, longer, 1, channels_last)
    found = operator(*arguments)
    # Of thousands of sums, libraries have added few in another order.
    assert relative_error([found], [expected]) < 1e-6 and found.stride() == expected.stride()
    opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_the_operator_is_the_function() -> None:
    x, weight = torch.randn(1, 4, 8, 8), torch.randn(4, 2, 3, 3)
    arguments: Any = (x, weight, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, False)
    assert torch.equal(operator(*arguments), module.convolution_gradient(*arguments))
