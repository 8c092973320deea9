"""Plans are tried on the recorded step: what codes do together, against what was predicted of each."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import bent_networks
import pytest
import torch
from conftest import Mixed, gradients, mixed_batch, relative_error
from torch import nn
from torch.nn import functional as F

import gact_fx
from gact_fx.config import Config
from gact_fx.graphs.replay import Replay
from gact_fx.plan import Plan, graph_fingerprint
from gact_fx.planning.budget import choose_plan
from gact_fx.planning.graph_profile import GraphProfile
from gact_fx.profiling.measure_plan import PlanMeter
from gact_fx.profiling.measure_step import measure_step
from gact_fx.profiling.recorder import Recorder
from gact_fx.profiling.rounding_meter import RoundingMeter
from gact_fx.profiling.tape import Step
from gact_fx.records import Sensitivity
from gact_fx.training.backend import Backend
from gact_fx.training.check_plan import MeasuredStep, check_plan
from gact_fx.training.session import Session

CONFIG = Config(budget_bits=4, inner="eager", min_elements=64)
Profiles = dict[str, GraphProfile]


def record(model: Callable[..., torch.Tensor], *batch: Any) -> list[Step]:
    recorder = Recorder(lambda steps, gradients: True)
    compiled = torch.compile(model, backend=Backend(Session(CONFIG), interpreted=True, recorder=recorder))
    recorder.start()
    compiled(*batch).backward()
    return recorder.take()


def profiled(steps: list[Step], change: Mapping[str, float]) -> tuple[MeasuredStep, Profiles]:
    """Measured as usual, but of the tensors in ``change`` so many times as much is said."""
    measured = []
    profiles: Profiles = {}
    for step, found in zip(steps, measure_step(steps, CONFIG), strict=True):
        measured.append({name: s.exceeding(change.get(name, 1.0)) for name, s in found.items()})
        profile = profiles.setdefault(graph_fingerprint(step.analysis.saved), GraphProfile(step.analysis))
        profile.add(step.analysis, measured[-1])
    return MeasuredStep(steps, measured), profiles


def chosen(profiles: Profiles) -> Plan:
    return choose_plan([profile.tensors() for profile in profiles.values()], CONFIG, "", None)


def test_all_codes_together_add_what_is_predicted_where_errors_do_not_multiply() -> None:
    latest, profiles = profiled(record(Mixed(), *mixed_batch()), {})
    plan = chosen(profiles)
    with torch.no_grad():
        meter = PlanMeter(latest.steps)
        found = meter.squared_error(plan)
        everything = frozenset((0, tensor.name) for tensor, _ in latest.steps[0].analysis.quantized())
        assert meter.squared_error(plan, everything) == 0
    assert plan.variance is not None and 0.6 < found / plan.variance < 1.7
    check_plan(latest, profiles, lambda: chosen(profiles), 0)
    assert not any(profile.excess for profile in profiles.values())
    corrected = chosen(profiles).variance
    assert corrected == pytest.approx(max(found, plan.variance))


@pytest.mark.parametrize(("bits", "is_believed"), [(2, True), (8, False)])
def test_less_than_predicted_is_believed_of_few_bits_alone(bits: float, is_believed: bool) -> None:
    """What was recorded is on the grid of 8 bits, where codes of about as many have no error, and prove nothing."""
    steps = record(Mixed(), *mixed_batch())
    # By far more than what differs from draw to draw, and what coefficients add, of which nothing else is said.
    latest, profiles = profiled(steps, dict.fromkeys(measure_step(steps, CONFIG)[0], 32.0))

    def choose() -> Plan:
        config = replace(CONFIG, adaptive=False, budget_bits=bits)
        return choose_plan([profile.tensors() for profile in profiles.values()], config, "", None)

    plan = choose()
    check_plan(latest, profiles, choose, 0)
    corrected = choose().variance
    assert plan.variance is not None and corrected is not None
    with torch.no_grad():
        added = PlanMeter(steps).squared_error(plan)
    assert added < plan.variance / 3
    assert added < corrected < 2 * added if is_believed else corrected > plan.variance / 2


@pytest.mark.parametrize("name", ["elu", "hardswish convolutions", "relu ** 1.5"])
def test_each_way_of_storing_is_tried_as_training_stores_it(name: str) -> None:
    """Coefficients, values without their masks, standardised values: against gradients of the rewritten graphs."""
    model, batch, loss_fn = bent_networks.build(name)
    gact_fx.compile(model, budget_bits=4, sample_batches=[batch], loss_fn=loss_fn, inner="eager")
    total = gact_fx.measure_gradient_error(model, [batch], loss_fn, draws=16).total
    plan = gact_fx.inspect(model).plan
    assert plan is not None and plan.variance is not None
    assert 0.5 < (total.variance + total.bias_estimate**2) / plan.variance < 2


@pytest.mark.parametrize("factor", [1e-3, 1e-6])
def test_what_was_said_too_little_of_is_found_and_planned_for(factor: float) -> None:
    steps = record(Mixed(), *mixed_batch())
    # The one that takes the most of the variance when it gets few bits; small ones get many, or stay exact.
    exact = measure_step(steps, CONFIG)[0]
    large = (t for t, _ in steps[0].analysis.quantized() if t.numel > 1024)
    tensor = max(large, key=lambda t: exact[t.name].value)
    latest, profiles = profiled(steps, {tensor.name: factor})
    before = chosen(profiles).graphs[0].entries()[tensor.key]
    check_plan(latest, profiles, lambda: chosen(profiles), 0)
    (profile,) = profiles.values()
    plan = chosen(profiles)
    after = plan.graphs[0].entries()[tensor.key]
    assert profile.excess[tensor.key] > 2 and after.excess > 2
    assert after.bits is not None and before.bits is not None and after.bits > before.bits
    with torch.no_grad():
        found = PlanMeter(steps, 1).squared_error(plan)
    assert plan.variance is not None and 0.4 < found / plan.variance < 2.5


def test_what_is_not_finite_is_stored_soundly() -> None:
    """As if nothing had been found out about the poles of one tensor."""
    weight = nn.Parameter(torch.randn(64, 64) / 8)

    def model(x: torch.Tensor) -> torch.Tensor:
        hidden = (x @ weight).relu()
        return (((hidden**1.5) @ weight) ** 2).sum()

    torch.manual_seed(0)
    steps = record(model, torch.randn(256, 64))
    latest, profiles = profiled(steps, {})
    (profile,) = profiles.values()
    poles = steps[0].with_poles
    assert poles
    finite = [
        {
            n: Sensitivity(1.0, dict.fromkeys(s.variances, 1e-3), squared_biases=s.squared_biases)
            for n, s in each.items()
        }
        for each in latest.sensitivities
    ]
    profile.found.clear()
    profile.add(steps[0].analysis, finite[0])
    check_plan(MeasuredStep(steps, finite), profiles, lambda: chosen(profiles), 0)
    with torch.no_grad():
        assert math.isfinite(PlanMeter(steps).squared_error(chosen(profiles)))


def test_a_trial_that_is_never_finite_corrects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    latest, profiles = profiled(record(Mixed(), *mixed_batch()), {})
    monkeypatch.setattr(PlanMeter, "squared_error", lambda *args: math.inf)
    check_plan(latest, profiles, lambda: chosen(profiles), 0)
    assert all(math.isfinite(profile.correction) for profile in profiles.values())


@pytest.mark.parametrize("has_collectives", [False, True])
def test_ranks_run_equally_many_passes_whatever_is_not_a_number(
    has_collectives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no derivative is measured by Algorithm 1, or, where other ranks would wait for its passes, is exact."""
    steps = record(Mixed(), *mixed_batch())
    monkeypatch.setattr(Step, "has_collectives", has_collectives)
    monkeypatch.setattr(RoundingMeter, "is_unknown", True)
    (found,) = measure_step(steps, CONFIG)
    values = [found[t.name].value for t, how in steps[0].analysis.quantized() if not how.bends]
    assert values and all(math.isinf(value) is has_collectives for value in values)


def test_what_backward_gave_is_kept_until_somebody_writes_to_it() -> None:
    weight = nn.Parameter(torch.randn(64, 64))

    def model(x: torch.Tensor) -> torch.Tensor:
        return ((x @ weight).sin() @ weight).square().sum()

    recorder = Recorder(lambda steps, gradients: True)
    compiled = torch.compile(model, backend=Backend(Session(CONFIG), interpreted=True, recorder=recorder))
    for is_written_to in (False, True):
        recorder.start()
        compiled(torch.randn(64, 64)).backward()
        assert weight.grad is not None
        if is_written_to:
            weight.grad.zero_()
        (step,) = recorder.take()
        again = Replay(step.backward, step.arguments).run({})
        assert step.outputs is not None and bool(step.outputs) is not is_written_to
        for kept, found in zip(step.outputs, again, strict=not is_written_to):
            assert kept is found is None or torch.equal(kept, found)
        weight.grad = None


@pytest.mark.parametrize("seed", [8, 14, 15])
def test_what_a_single_number_shows_by_chance_is_not_believed(seed: int) -> None:
    """One draw of a gradient of one element may be a hundredth of its deviation."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 512).requires_grad_(False)
            self.last = nn.Linear(512, 512).requires_grad_(False)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last((self.first(x) * self.scale).tanh()).square().mean()

    torch.manual_seed(seed)
    model, batches = Scaled(), [(torch.randn(1024, 64),)]
    gact_fx.compile(model, inner="eager", budget_bits=2, sample_batches=batches, seed=seed, recompute="off")
    found = gact_fx.measure_gradient_error(model, batches, draws=16)
    assert found.predicted_variance is not None
    assert (found.total.variance + found.total.bias_estimate**2) / found.predicted_variance < 4


class FewThatCount(nn.Module):
    """The gradient is that of the few largest elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.out = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, t, y = (layer(x) for layer in self.layers)
        factor = (F.elu(self.norm(h)) * (8 * t).exp()).detach()
        return (self.out(y * factor + F.gelu(t)) + h.sin()).square().mean()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("seed", [7, 11, 14])
def test_an_element_that_counts_for_most_is_no_code_by_luck(seed: int, inner: str) -> None:
    torch.manual_seed(seed)
    model, x = FewThatCount(), torch.randn(256, 64)
    reference = copy.deepcopy(model)
    gact_fx.compile(model, budget_bits=8, inner=inner, min_elements=128, sample_batches=[(x,)])
    model(x).backward()
    reference(x).backward()
    plan = gact_fx.inspect(model).plan
    exact = gradients(reference)
    assert plan is not None and plan.variance is not None
    predicted = (plan.variance / sum(float(g.square().sum()) for g in exact)) ** 0.5
    assert relative_error(gradients(model), exact) <= min(3 * predicted, 0.02)
