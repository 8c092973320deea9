"""What Inductor has in memory, beside what is predicted of its kernels."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from peak_bytes import peak_bytes
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from gact_fx.graphs.live_memory import peak_nbytes

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "cheap": lambda x: x.cos() * 2,
    "dear since torch 2.13": torch.tanh,
    "dear inside of something cheap": lambda x: x.exp() + 1,
    "a sigmoid": torch.sigmoid,
    "a logarithm": lambda x: x.abs().log1p(),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (i > 2)) for i, c in enumerate(CASES)])
def test_what_two_kernels_read_is_kept_where_inductor_keeps_it(case: str) -> None:
    x, weight = torch.randn(256, 256), torch.randn(256, 256)

    def program(x: Tensor, weight: Tensor) -> Tensor:
        shared = CASES[case](x)
        product = torch.mm(shared * 2, weight)
        return torch.mm(product * shared, weight)

    compiled = torch.compile(program)
    compiled(x, weight)
    found = peak_bytes(partial(_run_for, compiled, x, weight)).forward
    graph = make_fx(program, tracing_mode="fake")(x, weight).graph
    assert peak_nbytes(graph, [], fused=True) == pytest.approx(found, abs=1024)


def _run_for(program: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Tensor:
    program(x, weight)
    return torch.zeros((), requires_grad=True) + 0
