"""Try a plan on a recorded step before it is trusted, and correct what was predicted where the two differ."""

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
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
    """Write into ``profiles`` how much more than predicted the codes of ``choose()`` add on the ``latest`` step.

    ``choose`` makes the plan from the profiles, and is called again where these change.
    """
    meter = PlanMeter(latest.steps, seed)
    for rounds_left in reversed(range(ROUNDS)):
        plan = choose()
        predicted = _predicted(latest, profiles, plan)
        if not predicted:
            return
        found = meter.squared_error(plan)
        expected = math.fsum(predicted.values())
        is_wrong = not found <= TOLERANCE * expected + LEAST * meter.squared_norm
        blamed = _blamed(meter, plan, predicted, found) if is_wrong and rounds_left else {}
        for (index, name), factor in blamed.items():
            analysis = latest.steps[index].analysis
            key = next(tensor.key for tensor in analysis.saved if tensor.name == name)
            profiles[graph_fingerprint(analysis.saved)].exceed(key, factor)
        if not blamed:
            break
    if is_wrong:
        log.info("the codes' joint error is %.3g times what was predicted of each", found / expected if expected else 0)
    correction = found / expected if expected > 0 and math.isfinite(found) else 1.0
    for step in latest.steps:
        profiles[graph_fingerprint(step.analysis.saved)].correction = correction


def _predicted(latest: MeasuredStep, profiles: Mapping[str, GraphProfile], plan: Plan) -> dict[Place, float]:
    """What the codes of every tensor add to the variance on the latest step, as far as that is known."""
    found: dict[Place, float] = {}
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
    return found


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
            factor = (found - rest) / max(math.fsum(predicted[at] for at in part), sys.float_info.min)
        if factor > TOLERANCE:
            blamed.update(dict.fromkeys(part, factor))
    # Of several that each lead to what is not finite, none is to blame alone.
    return blamed if blamed or math.isfinite(found) else dict.fromkeys(places, math.inf)
