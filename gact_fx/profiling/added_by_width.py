"""What codes of one tensor add to the gradient, at every width, from what was measured at some."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

from gact_fx.codec.code import WIDTHS, Code
from gact_fx.profiling.neighbours import GROUP_SIZE

# Widths at which chains are evaluated, where values are exact and where they are read from 8 bits, between which they
# say nothing. Logarithms are interpolated between them.
MEASURED, MEASURED_OF_CODES = (2, 4, 8), (2, 4, 6)
# By so many times as much as first order, what codes add falls from one width to the next that is measured, and the
# widths between are measured as well.
AT_ONCE = 4.0


@dataclass(frozen=True)
class Added:
    """What codes do to the gradient by way of some elements, in units of squared gradient; infinite where a value would
    not be finite.

    ``own_bias`` is the sum over elements of their squared biases, ``coherent_bias`` what the square of the sum is more
    than that, and ``first`` what first order says of the same elements' variance.
    """

    variance: float
    own_bias: float
    coherent_bias: float
    first: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.variance + self.own_bias + self.coherent_bias


NOT_FINITE = Added(math.inf, math.inf, math.inf, 1.0)


def mean(found: Sequence[Added]) -> Added:
    """The mean of several measurements of the same."""
    if NOT_FINITE in found:
        return NOT_FINITE
    parts = zip(*(astuple(added) for added in found), strict=True)
    return Added(*(sum(values) / len(found) for values in parts))


def measure_widths(measure: Callable[[int], Added], widths: Sequence[int]) -> dict[int, Added]:
    """What ``measure`` finds at ``widths``, and at those between two of them that say too little.

    An element next to a jump is over it at 4 bits, and not at 8: what codes add then falls far faster than by first
    order, and at one of the widths between all at once.
    """
    found = {bits: measure(bits) for bits in widths}
    for low, high in pairwise(widths):
        if _falls_at_once(found[low], found[high]):
            found |= {bits: measure(bits) for bits in WIDTHS if low < bits < high}
    return dict(sorted(found.items()))


def _falls_at_once(few: Added, more: Added) -> bool:
    """Whether from few bits to more, what codes add falls far faster than first order says of the variance."""
    if not math.isfinite(few.total):
        return False
    return few.total * more.first > AT_ONCE * more.total * few.first


def all_widths(measured: Mapping[int, Added], rounding: str) -> dict[Code, Added]:
    """What codes of every width add, by what those of some do."""
    return {Code(bits, rounding, GROUP_SIZE): at_width(measured, bits) for bits in WIDTHS}


def at_width(measured: Mapping[int, Added], bits: float) -> Added:
    """What codes of ``bits`` add, by what was measured at two widths around it, or next to it."""
    if bits in measured:
        return measured[int(bits)]
    low = max((width for width in list(measured)[:-1] if width < bits), default=min(measured))
    high = min(width for width in measured if width > low)
    share = (bits - low) / (high - low)

    def interpolated(a: float, b: float) -> float:
        if not (a > 0 and b > 0 and math.isfinite(a) and math.isfinite(b)):
            return max(a, b)
        return min(math.exp((1 - share) * math.log(a) + share * math.log(b)), sys.float_info.max)

    # A bias that adds up is known to be none as soon as it is little: both kinds together fall smoothly.
    pairs = zip(_smooth(measured[low]), _smooth(measured[high]), strict=True)
    variance, own_bias, bias, first = (interpolated(a, b) for a, b in pairs)
    return Added(variance, own_bias, max(bias - own_bias, 0.0) if bias < math.inf else bias, first)


def _smooth(added: Added) -> tuple[float, float, float, float]:
    return added.variance, added.own_bias, added.own_bias + added.coherent_bias, added.first
