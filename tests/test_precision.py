"""Autocast with and without a gradient scaler, and models of other precisions. The oracle is eager autograd."""

import copy
from collections.abc import Callable
from math import hypot

import pytest
import torch
from activation_bytes import activation_bytes
from conftest import relative_error
from torch import nn
from torch.nn import functional as F

import gact_fx

X = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))
HALVES = [torch.bfloat16, torch.float16]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(F.gelu(self.b(torch.tanh(self.a(x)))))


def compiled(model: nn.Module, inner: str = "eager") -> nn.Module:
    return gact_fx.compile(model, budget_bits=8, min_elements=64, inner=inner)


def pair() -> tuple[nn.Module, nn.Module]:
    model = Net()
    reference = copy.deepcopy(model)
    return compiled(model), reference


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.double() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float64], ids=str)
def test_a_model_of_another_precision(dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    reference = copy.deepcopy(model)
    compiled(model)
    for _ in range(2):
        for each in (model, reference):
            each.zero_grad()
            each(X.to(dtype)).float().square().mean().backward()
        assert relative_error(gradients_of(model), gradients_of(reference)) < 0.02
    assert any(row.encoding == "quantize" and row.dtype in str(dtype) for row in gact_fx.inspect(model).rows)


def autocast_loss(model: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    with torch.autocast("cpu", dtype):
        return model(X).float().square().mean()


@pytest.mark.parametrize("recompute", ["auto", "off"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast(dtype: torch.dtype, recompute: str) -> None:
    model = Net()
    reference = copy.deepcopy(model)
    gact_fx.compile(model, budget_bits=8, min_elements=64, inner="eager", recompute=recompute)
    for _ in range(2):
        for each in (model, reference):
            each.zero_grad()
            autocast_loss(each, dtype).backward()
        assert relative_error(gradients_of(model), gradients_of(reference)) < 0.02
    rows = gact_fx.inspect(model).rows
    assert any(row.encoding == "quantize" and row.dtype in str(dtype) for row in rows)
    # Casts of weights are made again from the weights.
    shapes = {tuple(shape) for p in model.parameters() for shape in (p.shape, p.shape[::-1])}
    assert not any(row.encoding == "quantize" and tuple(row.shape) in shapes for row in rows)


def test_a_gradient_scaler_that_starts_too_high() -> None:
    """Its first steps overflow, also those that would be profiled; both models skip the same ones."""
    model, reference = pair()
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**28, growth_interval=4) for _ in range(2)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-2) for each in (model, reference)]
    overflows = 0
    for _ in range(24):
        found = []
        for each, scaler, optimizer in zip((model, reference), scalers, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(autocast_loss(each, torch.float16)).backward()
            scaler.unscale_(optimizer)
            found.append(gradients_of(each))
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        if all(gradient.isfinite().all() for gradient in found[1]):
            assert relative_error(*found) < 0.02
        else:
            overflows += 1
            assert not all(gradient.isfinite().all() for gradient in found[0])
        reference.load_state_dict(model.state_dict())
    assert 2 < overflows < 20
    assert gact_fx.inspect(model).ratio > 1.5


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 256), nn.Linear(256, 256)
        self.norm, self.c = nn.LayerNorm(256), nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.norm(F.gelu(self.b(torch.tanh(self.a(x))))))


BATCHES = torch.randn(8, 256, 32, generator=torch.Generator().manual_seed(1))
TARGET = torch.randn(256, 8, generator=torch.Generator().manual_seed(2))
# What 8 bits cost this network in fp32, compiled by Inductor: 0.0049 to 0.0073 over eight steps.
NOISE = 0.0073


def trained(model: nn.Module, x: torch.Tensor, autocast: torch.dtype | None) -> tuple[torch.Tensor, int]:
    """The loss, and the bytes that are held for its backward."""
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        out = model(x)
    loss = (out.float() - TARGET).square().sum()
    return loss, activation_bytes(loss, exclude=[*model.parameters(), x, TARGET])


def assert_as_near_as_eager(ours: nn.Module, eager: nn.Module, x: torch.Tensor, exact: nn.Module) -> None:
    """To the gradient of ``exact``, in fp32, beside the noise of the codes, which does not depend on rounding."""
    trained(exact, x.float(), None)[0].backward()
    error, rounding = (relative_error(gradients_of(each), gradients_of(exact)) for each in (ours, eager))
    # 0.6 to 0.95 times as much was measured.
    assert error < 1.1 * hypot(rounding, NOISE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_weights_of_16_bits_compiled_by_inductor(
    dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    model, eager = Normed().to(dtype), Normed().to(dtype)
    compiled(model, "inductor")
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-5)
    for x in BATCHES[:5].to(dtype):
        eager.load_state_dict(model.state_dict())
        held = []
        for each in (model, eager):
            each.zero_grad()
            loss, nbytes = trained(each, x, None)
            held.append(nbytes)
            loss.backward()
        exact = copy.deepcopy(eager).float()
        exact.zero_grad()
        assert_as_near_as_eager(model, eager, x, exact)
        optimizer.step()
    record_property("held, of eager", held[1] / held[0])
    # 3.8 was measured.
    assert held[1] / held[0] > 3.6


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_a_gradient_scaler_with_inductor(dtype: torch.dtype, record_property: Callable[[str, object], None]) -> None:
    """Steps with an infinity, the first one and one that runs by the plan, are skipped as in eager PyTorch."""
    model, eager = Normed(), Normed()
    compiled(model, "inductor")
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=2e-5) for each in (model, eager)]
    for step, x in enumerate(BATCHES):
        eager.load_state_dict(model.state_dict())
        exact, old = copy.deepcopy(eager), scalers[0].get_scale()
        exact.zero_grad()
        held = []
        for each, scaler, optimizer in zip((model, eager), scalers, optimizers, strict=True):
            optimizer.zero_grad()
            loss, nbytes = trained(each, x, dtype)
            held.append(nbytes)
            scaler.scale(loss * float("inf") if step in (0, 5) else loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        was_skipped = not all(gradient.isfinite().all() for gradient in gradients_of(model))
        is_unchanged = all(map(torch.equal, model.parameters(), exact.parameters()))
        assert was_skipped == is_unchanged == (step in (0, 5))
        assert scalers[0].get_scale() == scalers[1].get_scale() == old / (1 + was_skipped)
        if not was_skipped:
            assert_as_near_as_eager(model, eager, x, exact)
    assert gact_fx.inspect(model).plan is not None
    record_property("held, of eager", held[1] / held[0])
    # 4.9 was measured.
    assert held[1] / held[0] > 4.6


@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm_under_autocast(affine: bool) -> None:
    """Its statistics are in float32, whatever PyTorch's fake tensors say."""
    model = nn.Sequential(nn.Conv2d(8, 64, 3, padding=1), nn.InstanceNorm2d(64, affine=affine), nn.SiLU())
    reference, x = copy.deepcopy(model), torch.randn(16, 8, 12, 12)
    gact_fx.compile(model, budget_bits=8, inner="eager")
    for _ in range(3):
        for each in (model, reference):
            each.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = each(x)
            out.float().square().mean().backward()
    assert relative_error(gradients_of(model), gradients_of(reference)) < 0.02
