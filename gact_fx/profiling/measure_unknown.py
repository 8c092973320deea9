"""Measure what codes of tensors do that backward hands to operators of which nothing is known: by running these.

As by Algorithm 1, but against the exact gradient, so that bias is in it, and at several widths: where such an operator
compares, divides or exponentiates, one says nothing of the others.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gact_fx.codec.code import Code, relative_variance
from gact_fx.profiling.added_by_width import MEASURED, NOT_FINITE, Added, all_widths, measure_widths
from gact_fx.profiling.coefficient_meter import at_coefficients
from gact_fx.profiling.gradients import squared_norm
from gact_fx.profiling.measure_sensitivity import Change, Probe, carried
from gact_fx.profiling.neighbours import ROUNDINGS
from gact_fx.profiling.rounding_meter import BIAS_WEIGHT
from gact_fx.profiling.tape import Step
from gact_fx.profiling.unknown_operators import find_refusals
from gact_fx.records import Sensitivity

# What bias has of a squared error, and what variance has.
_LEAST_SHARE = 1e-3


@dataclass(frozen=True)
class Tried:
    """What codes of one tensor in groups of 256 were found to do, and the ``reason`` where none will do."""

    added: Mapping[Code, Added]
    reason: str

    def result(self, first: Sensitivity) -> Sensitivity:
        """For all codes; ``first`` has what they do where all elements count alike."""
        if not any(added.variance < math.inf for added in self.added.values()):
            return Sensitivity(math.inf, dict.fromkeys(first.variances, math.inf), reason=self.reason)
        added = {code: replace(found, first=first.variances[code]) for code, found in self.added.items()}
        return at_coefficients(first, added, 1.0)


def measure_unknown(steps: Sequence[Step], *, seed: int, draws: int) -> list[dict[str, Tried]]:
    """Per step, by name, the tensors that unknown operators read; of every code ``draws`` are tried, at least two."""
    unknown = [{how.name: how.unknown for _, how in step.analysis.quantized() if how.unknown} for step in steps]
    if any(unknown) and any(step.has_collectives for step in steps):
        # Ranks that tried different tensors would wait for each other.
        why = "reads it, which gact_fx does not know, and backward has collectives, which are not run again"
        return [{name: Tried({}, f"{by} {why}") for name, by in found.items()} for found in unknown]
    # Where these tensors are stored in codes, their masks are exact.
    masks = [{mask for _, how in step.analysis.quantized() if how.unknown for mask in how.masks} for step in steps]
    probes = [Probe(step, seed, fixed=fixed) for step, fixed in zip(steps, masks, strict=True)]
    most = sum(squared_norm(x) for probe in probes if any(unknown) for x in probe.gradients())
    results: list[dict[str, Tried]] = []
    for index, (step, found) in enumerate(zip(steps, unknown, strict=True)):
        refusals = find_refusals(step, found) if found else {}
        tried = {name: Tried({}, reason) for name, reason in refusals.items() if reason}
        for name, change in probes[index].changes(refusals.keys() - tried.keys()):
            measure = partial(_added, index, probes, change, draws, most)
            added: dict[Code, Added] = {}
            for rounding in ROUNDINGS:
                added |= all_widths(measure_widths(partial(measure, rounding), MEASURED), rounding)
            tried[name] = Tried(added, f"{found[name]} makes more of its codes' errors than the gradient is")
        results.append(tried)
    return results


def _added(
    index: int, probes: Sequence[Probe], change: Change, draws: int, most: float, rounding: str, bits: int
) -> Added:
    """What such codes add to the gradient, by draws that have nothing but their mean in common.

    What is not finite, or more than ``most``, will not do.
    """
    code, squares, total = Code(bits, rounding), 0.0, list[Any]()
    for draw in range(draws):
        outputs = change(code, draw)
        squares += carried(index, outputs, probes)
        total = [None if a is None else a + b for a, b in zip(total, outputs, strict=True)] if total else outputs
    square, coherent = squares / draws, (carried(index, total, probes) - squares) / (draws * (draws - 1))
    # A few draws say no more of it, and nothing lies between a number and zero.
    bias = min(max(coherent, _LEAST_SHARE * square), (1 - _LEAST_SHARE) * square)
    is_good = square + (BIAS_WEIGHT - 1) * bias <= most
    return Added(square - bias, 0.0, bias, relative_variance(code)) if is_good else NOT_FINITE
