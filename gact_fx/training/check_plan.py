"""Try a plan on a recorded step before it is trusted, and correct what was predicted where the two differ."""

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gact_fx.plan import Plan, graph_fingerprint
from gact_fx.planning.graph_profile import GraphProfile
from gact_fx.profiling.measure_plan import PlanMeter
from gact_fx.profiling.tape import Place, Step
from gact_fx.records import Sensitivity

log = logging.getLogger("gact_fx")
# A plan is made again where the error is so many times the prediction, and found in so many parts of the model at most.
TOLERANCE = 2.0
ROUNDS = 3
MOST_PARTS = 16
# Up to this width the steps of a code are many of those of 8 bits.
COARSE_BITS = 4
_SMALL = sys.float_info.min
# Squared errors below this share of the gradient's squared norm are those of float32 itself.
LEAST = 1e-10


@dataclass(frozen=True)
class MeasuredStep:
    """A recorded step, and the sensitivities that were measured on it, per graph, by slot name."""

    steps: Sequence[Step]
    sensitivities: Sequence[Mapping[str, Sensitivity]]


@torch.no_grad()
def check_plan(
    latest: MeasuredStep, profiles: Mapping[str, GraphProfile], choose: Callable[[], Plan], seed: int
) -> None:
    """Write into ``profiles`` how much more or less than predicted codes of ``choose()`` add on the ``latest`` step.

    ``choose`` makes the plan from the profiles, and is called again where these change.
    """
    meter = PlanMeter(latest.steps, seed)
    tried: list[_Trial] = []
    while len(tried) < ROUNDS:
        plan = choose()
        predicted = _predicted(latest, profiles, plan, meter)
        if not predicted:
            return
        found, excess = meter.squared_error(plan), {key: dict(profile.excess) for key, profile in profiles.items()}
        fine = math.fsum(predicted[at] for at in _fine(latest, plan, predicted))
        tried.append(_Trial(plan, found, math.fsum(predicted.values()), fine, excess))
        if found <= TOLERANCE * tried[-1].predicted + LEAST * meter.squared_norm or len(tried) == ROUNDS:
            break
        blamed = _blamed(meter, plan, predicted, found)
        for (index, name), factor in blamed.items():
            analysis = latest.steps[index].analysis
            key = next(tensor.key for tensor in analysis.saved if tensor.name == name)
            profiles[graph_fingerprint(analysis.saved)].exceed(key, factor)
        if not blamed:
            break
    best = min(tried, key=lambda trial: trial.found if math.isfinite(trial.found) else math.inf)
    correction = 1.0
    if TOLERANCE * best.found < best.predicted:
        # Of a gradient with few elements a single draw may say anything.
        correction = min((meter.largest_error(best.plan) + best.fine) / best.predicted, 1.0)
    elif best.predicted > 0 and math.isfinite(best.found):
        correction = max(best.found / best.predicted, 1.0)
    for key in {graph_fingerprint(step.analysis.saved) for step in latest.steps}:
        profiles[key].excess = best.excess[key]
        profiles[key].correction = correction
    if best.found > TOLERANCE * best.predicted + LEAST * meter.squared_norm:
        log.info("codes together add %.3g times what was predicted of each", best.found / max(best.predicted, _SMALL))


@dataclass(frozen=True)
class _Trial:
    """A plan, its squared error, found and predicted, and the excess by which it was made, by graph and tensor.

    ``fine`` is the part that is predicted of codes of more than 4 bits, or that lead to poles. What was recorded is on
    the grid of 8 bits or bfloat16 already: such codes may show less error of it than they will have, and poles may lie
    elsewhere.
    """

    plan: Plan
    found: float
    predicted: float
    fine: float
    excess: dict[str, dict[str, float]]


def _fine(latest: MeasuredStep, plan: Plan, places: Iterable[Place]) -> Iterator[Place]:
    """Those of the ``places`` whose codes have more than 4 bits, or lead to poles."""
    for index, name in places:
        saved = latest.steps[index].analysis.saved
        graph = plan.graph(graph_fingerprint(saved))
        bits = graph.entries()[next(t.key for t in saved if t.name == name)].bits if graph is not None else None
        if bits is not None and (bits > COARSE_BITS or name in latest.steps[index].with_poles):
            yield index, name


def _predicted(
    latest: MeasuredStep, profiles: Mapping[str, GraphProfile], plan: Plan, meter: PlanMeter
) -> dict[Place, float]:
    """What the codes of every tensor add to the variance on the latest step; where that is not known, it is tried."""
    found: dict[Place, float] = {}
    unknown: list[Place] = []
    for index, (step, sensitivities) in enumerate(zip(latest.steps, latest.sensitivities, strict=True)):
        key = graph_fingerprint(step.analysis.saved)
        graph, profile = plan.graph(key), profiles[key]
        assert graph is not None
        entries = graph.entries()
        for tensor, _ in step.analysis.quantized():
            if entries[tensor.key].code is None or tensor.name not in sensitivities:
                continue
            alone = replace(plan, graphs=(replace(graph, tensors=(entries[tensor.key],), runs=1),))
            weighed = sensitivities[tensor.name].exceeding(profile.excess.get(tensor.key, 1.0))
            variance = alone.variance_on({key: {tensor.key: weighed}})
            found[index, tensor.name] = variance if variance is not None and math.isfinite(variance) else 0.0
            if found[index, tensor.name] != variance:
                unknown.append((index, tensor.name))
    return found | {at: meter.squared_error(plan, found.keys() - {at}) for at in unknown}


def _blamed(meter: PlanMeter, plan: Plan, predicted: Mapping[Place, float], found: float) -> dict[Place, float]:
    """The tensors without whose codes the error would be less by more than was predicted, and by how many times."""
    places = list(predicted)
    size = -(-len(places) // MOST_PARTS)
    parts = [places[first : first + size] for first in range(0, len(places), size)]
    blamed: dict[Place, float] = {}
    for part in parts:
        rest = meter.squared_error(plan, frozenset(part))
        if not math.isfinite(found):
            factor = math.inf if math.isfinite(rest) else 0.0
        else:
            factor = (found - rest) / max(math.fsum(predicted[at] for at in part), _SMALL)
        if factor > TOLERANCE:
            blamed.update(dict.fromkeys(part, factor))
    # Of several that each lead to what is not finite, none is to blame alone.
    return blamed if blamed or math.isfinite(found) else dict.fromkeys(places, math.inf)
