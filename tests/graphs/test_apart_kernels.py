"""Loops between two calls of a library are functions of their own, between which memory is freed."""

from collections.abc import Callable

import pytest
import torch
from peak_bytes import peak_bytes
from torch._inductor import config

from gact_fx.graphs import apart_kernels
from gact_fx.graphs.apart_kernels import apart_kernels as in_apart_kernels

NUMEL = 2**20


def in_turn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Means of what was there before, three times: loops that cannot be one."""
    y = x @ weight
    for _ in range(3):
        y = (y - y.mean(0)).sin() / (1 + y.square().mean())
    return y @ weight


def little_is_written(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A loop whose result is small is the last one that reads ``y``, and a loop with a large result follows."""
    y = x @ weight
    z = y @ weight
    total = y.sum(0)
    z = (z - z.mean(0)).sin()
    return z @ weight + total


@pytest.mark.parametrize(("least", "at_once"), [(apart_kernels.LEAST_NBYTES, 2), (10**12, 3)])
@pytest.mark.parametrize("program", [in_turn, little_is_written])
def test_what_was_read_is_freed_between_loops(
    program: Callable[..., torch.Tensor], least: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart_kernels, "LEAST_NBYTES", least)
    x, weight = torch.randn(NUMEL // 64, 64), torch.randn(64, 64)
    torch._dynamo.reset()
    compiled = torch.compile(program)
    with in_apart_kernels(), config.patch(force_disable_caches=True, allow_buffer_reuse=False, inplace_buffers=False):
        torch.testing.assert_close(compiled(x, weight), program(x, weight), rtol=1e-3, atol=1e-3)
    start = torch.zeros((), requires_grad=True)
    found = peak_bytes(lambda: start + compiled(x, weight).sum()).forward / x.nbytes
    assert found == pytest.approx(at_once, abs=0.1)


def test_what_was_replaced_is_put_back() -> None:
    from torch._inductor.codegen.cpp import CppScheduling

    before = CppScheduling.ready_to_flush
    with pytest.raises(ValueError, match="within"), in_apart_kernels():
        assert CppScheduling.ready_to_flush is not before
        raise ValueError("within")
    assert CppScheduling.ready_to_flush is before
