from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_custom_operators import backward_of, clipped, mixing, noisy, pole, smooth, stepped, waving
from test_measure_adjoint import record
from torch import nn

from gact_fx.codec.code import Code
from gact_fx.config import Config
from gact_fx.profiling.measure_step import measure_step
from gact_fx.profiling.neighbours import codes_beside
from gact_fx.profiling.rounding_meter import BIAS_WEIGHT
from gact_fx.profiling.tape import Step
from gact_fx.profiling.unknown_operators import find_refusals
from gact_fx.records import Sensitivity
from gact_fx.training.rewrite import graph_plan, profiling_plan

Operator = Callable[[torch.Tensor], torch.Tensor]


def failing(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if float(gradient.abs().max()) > 1:
        raise RuntimeError("too large")
    return gradient * x.cos()


# Multiples of the gradient have the same multiples, sums have others.
normalised = mixing("normalised", torch.sin, lambda gradient, x: gradient**3 / gradient.square().mean() * x.cos())
folded = mixing("folded", torch.sin, lambda gradient, x: gradient.abs() * x.cos())
raising = mixing("raising", torch.sin, failing)
# What the layer below gives has one element with codes of 5 bits on both sides of it, and none with codes of 8.
EDGE = 2.157
jumping = mixing("jumping", torch.sin, lambda gradient, x: gradient * (1 + 0.01 * x.cos() + (x > EDGE)))


def step_of(operator: Operator) -> Step:
    torch.manual_seed(0)
    first, slopes = nn.Linear(32, 64), torch.randn(96, 64)
    (step,) = record(lambda x: (operator(first(x)) * slopes).mean(), torch.randn(96, 32))
    return step


def of_what_it_reads(step: Step, **options: Any) -> Sensitivity:
    """The first layer's result is what the operator reads."""
    (found,) = measure_step([step], Config(min_elements=64, **options))
    (name,) = (tensor.name for tensor in step.analysis.saved if tensor.key == "aten.addmm#0")
    return found[name]


@pytest.mark.parametrize(
    ("operator", "is_linear"),
    [(smooth, True), (stepped, True), (pole, True)]
    + [(operator, False) for operator in (clipped, noisy, normalised, folded, raising)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linearity_is_tried(operator: Operator, is_linear: bool, dtype: torch.dtype) -> None:
    step = step_of(lambda x: operator(x.to(dtype)).float())
    unknown = [how.name for _, how in step.analysis.quantized() if how.unknown]
    assert list(find_refusals(step, unknown).values()) == [
        "" if is_linear else f"{backward_of(operator)} is not linear in the gradient"
    ]


@pytest.mark.parametrize("sensitivity", ["adjoint", "empirical"])
def test_a_bent_operator_in_closed_form(sensitivity: str) -> None:
    """Of values x the gradient is 3 x^2, whose mean over codes is off by three times their variance."""
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 64), torch.randn(96, 32)
    (step,) = record(lambda x: smooth(layer(x)).sum(), x)
    assert [entry.code for entry in profiling_plan(step.analysis, Config()).tensors] == [None]
    found = of_what_it_reads(step, sensitivity=sensitivity, profile_draws=32)
    with torch.no_grad():
        h, weights = layer(x), 1 + x.square().sum(1, keepdim=True)
    for bits in (2, 4, 6, 8):
        low, high, (down, up) = codes_beside(h, bits)
        mean, moment = (down * (3 * low**2) ** k + up * (3 * high**2) ** k for k in (1, 2))
        bias, variance = of_layer(mean - 3 * h**2, x), float(((moment - mean**2) * weights).sum())
        code = Code(bits)
        if variance + BIAS_WEIGHT * bias > of_layer(3 * h**2, x):
            assert bits == 2 and found.variances[code] == float("inf")
            continue
        assert found.variances[code] == pytest.approx(variance + bias, rel=0.3)
        assert found.squared_bias(code) == pytest.approx(bias, rel=0.4, abs=0.02 * found.variances[code])


def test_masks_are_exact() -> None:
    """Dithered zeros would let all through that a ReLU stops."""
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 64), torch.randn(96, 32)
    (step,) = record(lambda x: waving(torch.relu(layer(x))).sum(), x, recompute="off")
    ((found,),) = (measured.values() for measured in measure_step([step], Config(min_elements=64)))
    assert found.variances[Code(8, "dither")] < found.variances[Code(4)] / 50


def of_layer(slopes: torch.Tensor, x: torch.Tensor) -> float:
    """The squared norm of a linear layer's gradient."""
    return float((slopes.T @ x).square().sum() + slopes.sum(0).square().sum())


def test_what_was_not_measured_stays_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(smooth)
    (entry,) = (e for e in graph_plan(step.analysis, None, Config(), must_fit=False).tensors if e.key == "aten.addmm#0")
    reads = f"{backward_of(smooth)} reads it, which gact_fx does not know, and"
    assert entry.code is None and entry.reason == f"{reads} it was not measured"
    monkeypatch.setattr(Step, "has_collectives", True)
    found = of_what_it_reads(step)
    assert min(found.variances.values()) == float("inf")
    assert found.reason == f"{reads} backward has collectives, which are not run again"


def test_a_jump_is_measured_at_the_widths_between() -> None:
    """One element's codes are on both sides of a jump at 4 and 5 bits, and not at 8."""
    torch.manual_seed(0)
    layer, x, end = nn.Linear(32, 64), torch.randn(96, 32), EDGE
    step = record(lambda x: jumping(layer(x)).sum(), x)[0]
    with torch.no_grad():
        over = {bits: [side > end for side in codes_beside(layer(x), bits)[:2]] for bits in (4, 5, 8)}
    assert [int((low != high).sum()) for low, high in over.values()] == [1, 1, 0]
    found = of_what_it_reads(step, sensitivity="adjoint", profile_draws=32)
    # Between 4 and 8 bits logarithms on a line would make it a fourteenth.
    assert found.variances[Code(5)] > 0.3 * found.variances[Code(4)] > 1e4 * found.variances[Code(8)]
