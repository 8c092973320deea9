"""Sample batches and training steps whose gradients overflow: they are left out, and profiling goes on."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

import gact_fx
from gact_fx.codec.packed_tensors import compressed_saved_tensors
from gact_fx.training.learner import MAX_NOT_FINITE
from gact_fx.training.minibatch_variance import Spread

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
BAD = X.clone()
BAD[0, 0] = float("nan")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.b(torch.tanh(self.a(x))).square().mean()
        return loss


def plan_of(model: nn.Module) -> gact_fx.Plan:
    plan = gact_fx.inspect(model).plan
    assert plan is not None
    return plan


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_sample_batch_with_nan_is_as_if_it_were_not_there(place: int) -> None:
    plans: list[Any] = []
    for batches in ([X, X + 1], [X, X + 1]):
        if plans:
            batches.insert(place, BAD)
        torch.manual_seed(0)
        model = gact_fx.compile(Net(), inner="eager", min_elements=64, sample_batches=batches)
        plans.append(plan_of(model))
    assert plans[0].minibatch_variance and plans[0] == plans[1]


def test_overflow_while_profiling_during_training(caplog: pytest.LogCaptureFixture) -> None:
    """As GradScaler makes it: the loss is scaled until something overflows, and that step is skipped."""
    torch.manual_seed(0)
    model = gact_fx.compile(Net(), inner="eager", min_elements=64, profile_every=2)
    found = []
    with caplog.at_level(logging.WARNING, "gact_fx"):
        for step in range(8):
            (model(X + step) * (float("inf") if step in (0, 1, 3, 4) else 1.0)).backward()
            plan = gact_fx.inspect(model).plan
            found.append(plan.minibatch_variance if plan else "no plan")
            model.zero_grad()
    assert found[:2] == ["no plan"] * 2 and found[2:5] == [None] * 3 and isinstance(found[-1], float)
    assert all(entry.sensitivity for graph in plan_of(model).graphs for entry in graph.tensors)
    assert "NaN or infinity" in caplog.text


def test_training_goes_on_uncompressed_where_no_step_is_finite(caplog: pytest.LogCaptureFixture) -> None:
    """Codes may be why, and would be so for ever."""
    model = gact_fx.compile(Net(), inner="eager", min_elements=64)
    with caplog.at_level(logging.WARNING, "gact_fx"):
        for _ in range(MAX_NOT_FINITE - 1):
            (model(X) * float("inf")).backward()
        assert "uncompressed" not in caplog.text
        (model(X) * float("inf")).backward()
    assert "20 steps in a row had NaN or infinity in their gradients; training goes on uncompressed" in caplog.text
    model.zero_grad()
    model(X).backward()
    assert gact_fx.inspect(model).plan is None
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_overflow_inside_backward_is_no_sample() -> None:
    """The loss and its gradient are finite, those of the weights are not."""
    model = gact_fx.compile(Net(), inner="eager", min_elements=64)
    model(BAD).backward()
    assert gact_fx.inspect(model).plan is None
    model(X).backward()
    assert all(entry.sensitivity for graph in plan_of(model).graphs for entry in graph.tensors)


class Masked(nn.Module):
    """Attention under a materialised mask of the smallest number, as transformers make it."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.qkv, self.out, self.least = nn.Linear(32, 96), nn.Linear(32, 1), least

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (t.view(rows, length, 2, 16).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = torch.full((length, length), self.least).triu(1) + 0 * x[:, :1, :1, None]
        mask = torch.minimum(mask, torch.where(keep > 0, 0.0, self.least)[:, None, None, :])
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        loss: torch.Tensor = self.out(y.transpose(1, 2).reshape(rows, length, 32)).square().mean()
        return loss


@pytest.mark.parametrize("least", [torch.finfo(torch.float32).min, float("-inf"), -1e9, -1e4])
def test_a_mask_is_not_rounded_where_eager_operators_save_it(least: float) -> None:
    model, x = Masked(least), torch.randn(8, 32, 32)
    keep = (torch.rand(8, 32) > 0.3).float()
    keep[:, 0] = 1
    exact = torch.autograd.grad(model(x, keep), list(model.parameters()))
    with compressed_saved_tensors():
        loss = model(x, keep)
    found = torch.autograd.grad(loss, list(model.parameters()))
    for a, b in zip(found, exact, strict=True):
        assert b.isfinite().all()
        assert (a - b).norm() < 0.05 * b.norm() + 1e-6


def test_one_batch_with_a_mask_gives_a_variance() -> None:
    torch.manual_seed(0)
    model, keep = Masked(torch.finfo(torch.float32).min), torch.ones(8, 32)
    model = gact_fx.compile(
        model, inner="eager", sample_batches=[(torch.randn(8, 32, 32), keep)], loss_fn=lambda m, b: m(*b)
    )
    variance = plan_of(model).minibatch_variance
    assert variance is not None and 0 < variance < 1e6


def test_complex_gradients_vary_in_their_imaginary_parts_too() -> None:
    rows = [torch.randn(5, dtype=torch.complex64) for _ in range(4)]
    spread, leaf = Spread(), torch.zeros(())
    for row in rows:
        spread.add({leaf: row.to(torch.complex128)})
    wanted = sum(part.double().var(0).sum() for part in torch.view_as_real(torch.stack(rows)).unbind(-1))
    assert spread.variance() == pytest.approx(float(wanted))
