"""What Inductor has in memory, beside what is predicted of its kernels."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from peak_bytes import peak_bytes
from torch import Tensor
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx

from gact_fx.graphs.live_memory import peak_nbytes
from gact_fx.graphs.realize_less import realizing_less

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "cheap": lambda x: x.cos() * 2,
    "an exponential": lambda x: x.exp() + 1,
    "two kinds of heavy operators": lambda x: x.exp().sigmoid(),
    "heavy since torch 2.13": lambda x: x.exp().tanh(),
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

    torch._dynamo.reset()
    compiled = torch.compile(program)
    with realizing_less(), config.patch(force_disable_caches=True):
        compiled(x, weight)
    found = peak_bytes(partial(_run_for, compiled, x, weight)).forward
    graph = make_fx(program, tracing_mode="fake")(x, weight).graph
    assert peak_nbytes(graph, [], fused=True) == pytest.approx(found, abs=1024)


def _run_for(program: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Tensor:
    program(x, weight)
    return torch.zeros((), requires_grad=True) + 0
