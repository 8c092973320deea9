"""What codes add to the variance of the gradient, tensor by tensor."""

import math

from gact_fx.codec.code import relative_variance
from gact_fx.plan import Plan, TensorPlan
from gact_fx.records import Sensitivity


def added_variance(entry: TensorPlan, measured: Sensitivity | None = None) -> float | None:
    """What one copy of a tensor adds to the gradient's variance by its ``entry``, in units of squared gradient.

    As it was ``measured`` for that code; where it was not, by the tensor's sensitivity and the code's width (GACT,
    equation 4). 0 where the tensor is exact, None where nothing is known.
    """
    if entry.code is None:
        return 0.0
    if measured is not None and entry.stored != "values":
        measured = measured.others.get(entry.stored)
    found = None if measured is None else measured.variance(entry.code, merged=entry.merged)
    if found is not None and math.isfinite(found):
        return found
    if entry.sensitivity is None or not math.isfinite(entry.sensitivity):
        return None
    return entry.sensitivity * relative_variance(entry.code, merged=entry.merged and entry.code.bits > 1)


def share_text(share: float | None) -> str:
    """A share in percent, for people; '' where it is not known."""
    if share is None:
        return ""
    if share < 5e-4:
        return "<0.1 %" if share else "0 %"
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def noise_sentence(plan: Plan | None) -> str:
    """How noisy ``plan`` makes the gradient, '' where that was not measured."""
    if plan is None or plan.variance is None:
        return ""
    if not plan.minibatch_variance:
        return f"adds {plan.variance:.2e} to the gradient's variance; two sample batches tell how much that is"
    share = plan.variance / plan.minibatch_variance
    return f"adds {share_text(share)} to the variance that the minibatch gradient has anyway (predicted)"
