from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Mixed, mixed_batch
from torch import nn

import gact_fx
from gact_fx import ops
from gact_fx.codec.code import step_variance
from gact_fx.profiling.rounding_meter import REFERENCE


def sensitivities(
    model: nn.Module, loss_fn: Callable[[Any, Any], torch.Tensor], batch: object, **options: Any
) -> dict[str, float]:
    gact_fx.compile(model, inner="eager", min_elements=64, sample_batches=[batch], loss_fn=loss_fn, **options)
    loss_fn(model, batch).backward()
    return {row.op: row.sensitivity for row in gact_fx.inspect(model).rows if row.sensitivity is not None}


def test_a_linear_layer_has_the_sensitivity_that_theory_gives() -> None:
    """grad W = h^T t is linear in h, so the variance over seeds can be computed directly from the codec."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))
    x, t = torch.randn(64, 32), torch.randn(64, 16)
    found = sensitivities(model, lambda m, b: (m(b) * t).sum(), x, profile_draws=32, budget_bits=8)
    h = torch.tanh(model[0](x)).detach()
    draws = [
        ops.decompress(ops.compress(h, REFERENCE.bits, 256, seed), h.shape, h.dtype, REFERENCE.bits, 256)
        for seed in range(32)
    ]
    # The saved tanh moves its own layer's weight gradient, and through tanh' the first layer's.
    w = model[2].weight.detach()  # type: ignore[operator]

    def gradient(value: torch.Tensor) -> torch.Tensor:
        before = (t @ w) * (1 - value**2)
        return torch.cat([(t.T @ value).flatten(), (before.T @ x).flatten(), before.sum(0)])

    gradients = torch.stack([gradient(value) for value in draws])
    expected = float(gradients.var(0).sum()) / step_variance(REFERENCE.bits)
    # Both are estimates from 32 draws of one quantity.
    assert found["aten.tanh"] == pytest.approx(expected, rel=0.35)


def test_only_what_backward_reads_counts() -> None:
    found = sensitivities(Mixed(), lambda m, b: m(*b), mixed_batch())
    assert len(found) > 4 and all(value > 0 for value in found.values())


def test_sensitivity_follows_the_gradient_through_a_graph_break() -> None:
    """A tensor of the second graph moves the first graph's parameters; cutting the model must not hide that."""

    class Cut(nn.Module):
        def __init__(self, broken: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second, self.broken = nn.Linear(32, 64), nn.Linear(64, 64), broken

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x) * 30
            if self.broken:
                torch._dynamo.graph_break()
            # The second graph's only parameter-free part: all of its sensitivity lies upstream.
            return x.sigmoid().square().sum()

    x = torch.randn(64, 32)
    whole = sensitivities(Cut(False), lambda m, b: m(b), x, profile_draws=16)
    cut = sensitivities(Cut(True), lambda m, b: m(b), x, profile_draws=16)
    assert cut["aten.sigmoid"] == pytest.approx(whole["aten.sigmoid"], rel=0.3)


def test_profiling_draws_the_same_noise_twice() -> None:
    first = sensitivities(Mixed(), lambda m, b: m(*b), mixed_batch())
    torch._dynamo.reset()
    torch.manual_seed(0)
    assert first.keys() == sensitivities(Mixed(), lambda m, b: m(*b), mixed_batch()).keys()
