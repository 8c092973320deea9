"""Measure what every way of storing a tensor would add to the variance of the gradient.

With a_i the mean squared sensitivity of the gradient to element i (`measure_adjoint`), codes with independent errors
add ``sum_i a_i var_i``. The variance of an error is known for every rounding: ``step^2 p (1 - p)`` for stochastic
rounding of a value that lies p steps above a code, ``step^2 / 12`` for subtractive dither, where a step is the range
of the group over ``2^bits - 1``, rounded up as a blob's are in the mean. Codes of rotated groups have errors of a known
part of the group's variance. So nothing is drawn: ranges and weights are summed over the whole tensor, and what depends
on p or on the group's variance is evaluated on blocks of it.
"""

import math
from collections.abc import Sequence

import torch
from torch import fx

from gact_fx.codec.code import Code, step_variance
from gact_fx.passes.merge_masks import Stopped
from gact_fx.profiling.cell_ranges import PIECE, CellRanges
from gact_fx.profiling.channel_ranges import ChannelRanges
from gact_fx.records import Sensitivity

# The width and group size that c_l is quoted at.
REFERENCE = Code(4, "stochastic", 256)
# Positions between codes are resolved by values that were stored in this many bits more, or exactly.
MARGIN = 2
# What a squared bias counts beside a variance: averages over steps, momentum's over ten or so, leave it as it is.
BIAS_WEIGHT = 10.0
FINEST = 6


def code_bits(reading: fx.Node) -> int | None:
    """The width of the codes that a node with a saved tensor's values decompresses, None where it has them exactly."""
    if reading.target is not torch.ops.gact_fx.decompress.default:
        return None
    return Code.of_decompress(reading.args).bits


class RoundingMeter:
    """Collects the squared sensitivities of one tensor's elements, without keeping them all.

    ``values`` are the tensor's values in memory order, whose groups are those of the codes. ``bits`` is the width of
    the codes that they were read from, None where they are exact: between finer codes their positions say nothing. What
    was read from codes has the dimensions in memory order, too, so that groups within channels are measured as well.
    ``stopped``: what a mask that the codes could tell stops.
    """

    def __init__(self, values: torch.Tensor, bits: int | None = None, stopped: Stopped | None = None) -> None:
        self._finest = FINEST if bits is None else max(min(bits - MARGIN, FINEST), 0)
        flat = values.detach().reshape(-1)
        self._all = CellRanges(flat)
        self._passed = None if stopped is None else CellRanges(flat, stopped.mask.reshape(-1))
        self._channels = ChannelRanges(values) if bits is not None and ChannelRanges.reads(values) else None
        self._is_lossless = stopped is not None and stopped.error is None
        self._bias = 0.0
        self._count = 0
        self._is_even = False

    def add(self, sensitivity: torch.Tensor, stopped: Stopped | None = None) -> None:
        """Add one probe's derivative of the gradient with respect to the values, in the same order.

        ``stopped`` is what the meter was made with.
        """
        flat = sensitivity.detach().reshape(-1)
        mask = None if stopped is None else stopped.mask.reshape(-1)
        for first in range(0, len(flat), PIECE):
            squares = flat[first : first + PIECE].float().square()
            self._all.add(squares, first)
            if self._passed is not None and mask is not None:
                self._passed.add(squares.masked_fill(mask[first : first + PIECE], 0), first)
        if self._channels is not None:
            self._channels.add(flat)
        if stopped is not None and stopped.error is not None:
            moved = sensitivity.detach().reshape(stopped.error.shape) * stopped.error
            # The probe's signs are independent from channel to channel, but the errors within one belong together.
            channels = moved.sum([d for d in range(moved.dim()) if d != stopped.channel])
            self._bias += float(channels.double().square().sum())
        self._count += 1

    def divide(self, parts: int) -> None:
        """Take one of so many equal parts of what was added."""
        for weighed in self._each():
            weighed.scale(1 / parts)
        self._bias /= parts

    def weigh_equally(self) -> None:
        """Forget the sensitivities; every element counts alike."""
        for weighed in self._each():
            weighed.weigh_equally()
        self._bias, self._count, self._is_even = math.inf, 1, True

    def _each(self) -> "list[CellRanges | ChannelRanges]":
        return [weighed for weighed in (self._all, self._passed, self._channels) if weighed is not None]

    @property
    def is_unknown(self) -> bool:
        """Whether derivatives were not numbers, as those of what a mask stops may be (0 times infinity)."""
        return self._all.is_unknown

    def result(
        self, group_sizes: Sequence[int], value: float | None = None, row_numel: int | None = None
    ) -> Sensitivity:
        """What codes of every width, rounding and group size add.

        ``value``: c_l where it is known from elsewhere; the rest is then scaled to it. With the elements of a row of
        the batch, ``row_numel``, there is what its groups count for, too.
        """
        sizes = sorted({*group_sizes, REFERENCE.group_size})
        variances = self._all.variances(sizes, self._finest, self._count)
        if self._channels is not None:
            variances |= self._channels.variances(sizes, self._count)
        merged: dict[Code, float] = {}
        bias = self._squared_bias()
        if self._passed is not None and bias is not None:
            found = self._passed.variances(sizes, self._finest, self._count, merged=True)
            merged = {code: variance + BIAS_WEIGHT * bias for code, variance in found.items()}
        found_value = variances[REFERENCE] / step_variance(REFERENCE.bits)
        if value is not None and found_value > 0:
            factor = value / found_value
            variances = {code: factor * variance for code, variance in variances.items()}
            merged = {code: factor * variance for code, variance in merged.items()}
        places = {} if row_numel is None or self._is_even else self._all.places(sizes, self._count, row_numel)
        return Sensitivity(found_value if value is None else value, variances, merged, places=places)

    def _squared_bias(self) -> float | None:
        """Of the gradient, from what merging a mask loses; None where it is not known."""
        if self._is_lossless:
            return 0.0
        return self._bias / self._count if self._count and math.isfinite(self._bias) else None


class OneError:
    """Derivatives with respect to what several runs of a graph store in the same codes: these have one error."""

    def __init__(self) -> None:
        self._meters: list[tuple[RoundingMeter, Stopped | None]] = []
        self._sums: list[torch.Tensor] = []

    def add(self, meter: RoundingMeter, stopped: Stopped | None, slopes: list[torch.Tensor]) -> None:
        """One more run, with one derivative per probe, or none."""
        self._meters.append((meter, stopped))
        both = self._sums and slopes
        self._sums = [a + b for a, b in zip(self._sums, slopes, strict=True)] if both else self._sums or slopes

    def finish(self) -> None:
        """Give every run an equal part of what the error does to all that it reaches."""
        for meter, stopped in self._meters:
            for slope in self._sums:
                meter.add(slope, stopped)
            meter.divide(len(self._meters))
