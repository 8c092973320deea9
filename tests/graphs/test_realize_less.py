"""An exponential that several loops read is computed by each of these, and is not in memory."""

import contextlib

import pytest
import torch
from peak_bytes import peak_bytes
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import gact_fx
from gact_fx.graphs import compilers
from gact_fx.graphs.realize_less import realizing_less

ROWS, WIDTH = 1024, 128


def step(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def peak_of_backward() -> int:
    """Bytes at the peak of a planned step's backward pass."""
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.SiLU())]
    model, x = nn.Sequential(*layers, nn.Linear(WIDTH, 8)), torch.randn(ROWS, WIDTH)
    torch._dynamo.reset()
    gact_fx.compile(model, inner="inductor", sample_batches=[x], loss_fn=step)
    with config.patch(force_disable_caches=True):
        step(model, x).backward()
    model.zero_grad(set_to_none=True)
    return peak_bytes(lambda: step(model, x)).backward


def test_backward_of_silu_has_a_tensor_less_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = peak_of_backward()
    monkeypatch.setattr(compilers, "realizing_less", contextlib.nullcontext)
    activation = ROWS * WIDTH * 4
    assert found <= peak_of_backward() - 0.9 * activation


def test_what_is_expanded_is_computed_once() -> None:
    """The gates of squeeze-and-excitation, and one large tensor of which each element is read sixteen times."""
    for shape, gate in (((8, 64, 32, 32), (8, 64, 1, 1)), ((16, 1024, 128), (1, 1024, 128))):
        torch._dynamo.reset()
        x, g = torch.randn(shape), torch.randn(gate)
        compiled = torch.compile(lambda x, g: x * g.sigmoid())
        with realizing_less(), config.patch(force_disable_caches=True):
            _, (code,) = run_and_get_code(compiled, x, g)
        usual = torch.compile(lambda x, g: x * g.sigmoid())
        torch._dynamo.reset()
        with config.patch(force_disable_caches=True):
            _, (expected,) = run_and_get_code(usual, x, g)
        assert code.count("empty_strided_cpu(") == expected.count("empty_strided_cpu(")


def test_what_was_replaced_is_put_back() -> None:
    from torch._inductor.ir import StorageBox

    before = StorageBox.should_realize_on_reuse
    with pytest.raises(ValueError, match="within"), realizing_less():
        assert StorageBox.should_realize_on_reuse is not before
        raise ValueError("within")
    assert StorageBox.should_realize_on_reuse is before
