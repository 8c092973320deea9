"""Batches to profile on that are out of the ordinary: no graph, no finite gradient, no two halves."""

import logging
import math
from typing import Any

import pytest
import torch
from conftest import Mixed, mixed_batch
from torch import nn
from torch.nn import functional as F

import gact_fx
from gact_fx.training.check_plan import MeasuredStep, check_plan


class Uncaptured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x)).square().mean()


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x)).values().square().mean()


def test_a_model_that_dynamo_leaves_to_eager_trains(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(64, 64)
    with caplog.at_level(logging.WARNING, "gact_fx"):
        model = gact_fx.compile(Uncaptured(), inner="eager", sample_batches=[(x,)])
    assert "captured no graph" in caplog.text
    model(x).backward()
    assert model.linear.weight.grad is not None
    assert gact_fx.inspect(model).plan is None


def test_jagged_tensors_have_no_halves() -> None:
    x = torch.nested.nested_tensor([torch.randn(n, 64) for n in (30, 40, 50)], layout=torch.jagged)
    model = gact_fx.compile(Jagged(), inner="eager", sample_batches=[(x,)])
    plan = gact_fx.inspect(model).plan
    assert plan is not None and plan.minibatch_variance is None
    model(x).backward()


def test_whose_fault_a_gradient_without_numbers_is() -> None:
    with pytest.raises(ValueError, match="the last one has none in eager PyTorch either"):
        gact_fx.compile(
            Mixed(), inner="eager", sample_batches=[mixed_batch()], loss_fn=lambda m, b: m(*b) * float("nan")
        )


def test_the_plan_is_tried_although_the_last_batch_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[MeasuredStep] = []

    def check(latest: MeasuredStep, *args: Any) -> None:
        tried.append(latest)
        check_plan(latest, *args)

    monkeypatch.setattr("gact_fx.training.session.check_plan", check)
    good = mixed_batch()
    bad = tuple(torch.full_like(x, math.nan) if x.is_floating_point() else x for x in good)
    gact_fx.compile(Mixed(), inner="eager", sample_batches=[bad, good, bad])
    assert len(tried) == 1 and all(step.is_finite for step in tried[0].steps)


@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_dropout_is_not_drawn_anew_under_a_memory_budget(budget: float) -> None:
    """The loss is linear in the last layer's weight, so that the loss is the weight times its gradient."""
    import torch._functorch.config as functorch_config

    last = nn.Linear(64, 64, bias=False)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.3), last)
    with functorch_config.patch(activation_memory_budget=budget):
        gact_fx.compile(model, inner="eager", budget_bits=8, min_elements=64)
        for _ in range(2):
            model.zero_grad()
            loss = model(torch.randn(512, 64)).mean()
            loss.backward()
    assert last.weight.grad is not None
    assert float((last.weight * last.weight.grad).sum().detach() / loss.detach()) == pytest.approx(1, abs=0.05)
