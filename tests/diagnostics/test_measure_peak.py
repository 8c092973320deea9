"""The peak of a step: what the meter finds, and what the report predicts and remembers of it."""

import gc

import pytest
import torch
from conftest import Mixed, mixed_batch
from peak_bytes import peak_bytes
from torch import nn

import gact_fx


def step(model: nn.Module) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    loss: torch.Tensor = model(*mixed_batch(32))
    return loss


def test_the_report_has_what_was_measured_beside_what_was_predicted() -> None:
    model = gact_fx.compile(Mixed(dropout=0.1), inner="eager", sample_batches=[mixed_batch(32)])
    predicted = gact_fx.inspect(model)
    assert predicted.peak_before is None and predicted.peak_predicted is not None
    step(model).backward()
    # The batch is there before, as in a training loop.
    batch = mixed_batch(32)
    model.zero_grad(set_to_none=True)
    expected = peak_bytes(lambda: model(*batch))
    model.zero_grad(set_to_none=True)
    assert gact_fx.inspect(model).peak_measured is None
    with gact_fx.measure_peak(model) as peak:
        model(*batch).backward()
    report = gact_fx.inspect(model)
    assert peak.nbytes == report.peak_measured == pytest.approx(expected.step, abs=64)
    assert report.peak_predicted == pytest.approx(expected.step, abs=64)
    assert predicted.peak_predicted == pytest.approx(expected.step, rel=0.05)
    assert report.gradients == expected.left == sum(p.nbytes for p in model.parameters())
    assert f"{expected.step / 1e6:.2f} MB measured" in str(report)
    assert f'"peak_measured": {peak.nbytes}' in report.to_json()


def test_garbage_from_before_is_not_taken_off() -> None:
    """Python may find it at any time: it lowered the figures of a test by chance."""

    def loss() -> torch.Tensor:
        gc.collect()
        return torch.ones(1000, requires_grad=True).sum()

    def leave_garbage() -> None:
        cycle = [torch.empty(100_000)]
        cycle.append(cycle)  # type: ignore[arg-type]

    expected = peak_bytes(loss)
    leave_garbage()
    assert peak_bytes(loss) == expected
    leave_garbage()
    with gact_fx.measure_peak(nn.Linear(1, 1)) as peak:
        gc.collect()
        torch.ones(1000)
    assert peak.nbytes == 4000


def test_gradients_are_no_activations() -> None:
    """Where they take most, the peak of a step is far above that of activations."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())))
    x = torch.randn(64, 256)
    gact_fx.compile(model, inner="eager")
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()
    model.zero_grad(set_to_none=True)
    with gact_fx.measure_peak(model) as peak:
        model(x).sum().backward()
    report = gact_fx.inspect(model)
    assert report.gradients == 4 * 4 * (256 * 256 + 256)
    assert report.peak_predicted == pytest.approx(peak.nbytes, rel=0.02)
    assert report.peak_activations is not None and report.peak_predicted is not None
    assert report.bytes_after < report.peak_activations < 0.5 * report.peak_predicted


def test_the_report_forgets_what_another_plan_took() -> None:
    model = gact_fx.compile(Mixed(), inner="eager")
    for has_plan in (False, True):
        with gact_fx.measure_peak(model) as peak:
            step(model).backward()
        assert peak.nbytes is not None and peak.nbytes > 1e6
        # The first step is profiled.
        assert (gact_fx.inspect(model).peak_measured == peak.nbytes) is has_plan


def test_any_model_can_be_measured() -> None:
    model = nn.Linear(1000, 10)
    with gact_fx.measure_peak(model) as peak:
        assert peak.nbytes is None
        kept = [torch.empty(1000, dtype=torch.uint8) for _ in range(3)]
        del kept[1:]
    assert peak.nbytes == pytest.approx(3000, abs=200)


def test_nothing_is_predicted_where_nothing_is_compressed() -> None:
    model = gact_fx.compile(Mixed(), budget_bits=None, inner="eager")
    step(model).backward()
    report = gact_fx.inspect(model)
    assert report.peak_activations is report.peak_predicted is report.gradients is None
    assert "peak" not in str(report)
