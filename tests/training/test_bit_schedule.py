"""Budgets of bits by training step."""

import logging
from typing import Any

import pytest
import torch
from conftest import gradients, relative_error
from torch import nn

import gact_fx
from gact_fx.errors import UsageError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))


def step(model: nn.Module) -> float:
    """The relative error of one step's gradient."""
    reference = network()
    reference.load_state_dict(model.state_dict())
    x = torch.randn(64, 64)
    model.zero_grad()
    model(x).square().mean().backward()
    reference(x).square().mean().backward()
    return relative_error(gradients(model), gradients(reference))


def bits(model: nn.Module) -> float | None:
    plan = gact_fx.inspect(model).plan
    return None if plan is None else plan.budget_bits


@pytest.mark.parametrize("schedule", [{4: 2, 0: 8}, lambda at: 8.0 if at < 4 else 2.0], ids=["steps", "function"])
def test_bits_change_where_the_schedule_says(schedule: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = gact_fx.compile(network(), budget_bits=schedule, inner="eager")
    with caplog.at_level(logging.INFO, "gact_fx"):
        errors = [(step(model), bits(model)) for _ in range(7)]
    assert [found for _, found in errors[1:]] == [8, 8, 8, 2, 2, 2]
    assert max(error for error, _ in errors[1:4]) < 0.02 < min(error for error, _ in errors[4:])
    assert "budget_bits=2 from now on" in caplog.text
    # What was measured serves both plans.
    assert caplog.text.count("profiling") == 1


def test_evaluation_is_no_step() -> None:
    model = gact_fx.compile(network(), budget_bits={0: 8, 2: 4}, inner="eager")
    step(model)
    for _ in range(5):
        with torch.no_grad():
            model(torch.randn(64, 64))
    step(model)
    assert bits(model) == 8
    step(model)
    assert bits(model) == 4


def test_small_changes_wait_for_more() -> None:
    model = gact_fx.compile(network(), budget_bits=lambda at: 8 - 0.2 * at, inner="eager")
    seen = []
    for _ in range(8):
        step(model)
        seen.append(bits(model))
    assert seen[1:] == pytest.approx([8, 8, 7.4, 7.4, 7.4, 6.8, 6.8])


def test_sample_batches_serve_every_budget() -> None:
    batches = [torch.randn(64, 64) for _ in range(2)]
    model = gact_fx.compile(
        network(), budget_bits={0: 6, 1: 3}, inner="eager", sample_batches=batches,
        loss_fn=lambda model, x: model(x).square().mean(),
    )  # fmt: skip
    step(model)
    assert bits(model) == 6
    step(model)
    assert bits(model) == 3


def test_a_plan_that_was_given_is_followed_by_one_that_is_measured() -> None:
    first = gact_fx.compile(network(), budget_bits=8, inner="eager")
    for _ in range(2):
        step(first)
    plan = gact_fx.inspect(first).plan
    model = gact_fx.compile(network(), budget_bits={0: 8, 2: 3}, plan=plan, profile_every=100, inner="eager")
    found = []
    for _ in range(5):
        step(model)
        found.append(bits(model))
    assert found[:2] == [8, 8]
    assert found[-1] == 3


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({}, "have bits from step 0 on"),
        ({5: 4}, "have bits from step 0 on"),
        ({0: 4, 0.5: 2}, "have bits from step 0 on"),
        ({0: 4, 9: 40}, r"budget_bits must lie in \[1, 16\], or be None for no compression, got 40"),
        ({0: None}, "must say how many"),
        (lambda at: "four", "budget_bits must lie in"),
    ],
)
def test_what_is_no_schedule_is_refused(schedule: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        gact_fx.compile(network(), budget_bits=schedule)


def test_a_function_that_goes_wrong_is_told_with_the_step() -> None:
    model = gact_fx.compile(network(), budget_bits=lambda at: 4 if at < 2 else 0, inner="eager")
    step(model)
    step(model)
    with pytest.raises(UsageError, match="in step 2: budget_bits must lie in"):
        step(model)


def test_a_schedule_is_for_compile() -> None:
    options: dict[str, Any] = {"budget_bits": {0: 8, 5: 4}}
    compiled = torch.compile(network(), backend="gact", options=options)
    with pytest.raises(Exception, match="give a number of budget_bits, not a schedule"):
        compiled(torch.randn(64, 64))
    plan = gact_fx.inspect(gact_fx.compile(network(), budget_bits={0: 8, 5: 4}, inner="eager")).plan
    assert plan is None
