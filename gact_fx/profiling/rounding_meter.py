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
from torch.nn import functional as F

from gact_fx.codec.code import ROTATED_VARIANCES, WIDTHS, Code, step_variance
from gact_fx.codec.layout import BFLOAT16_BITS
from gact_fx.codec.rotation import MOST_OF_NORM
from gact_fx.passes.merge_masks import Stopped
from gact_fx.patterns import MOST_ROWS, Places
from gact_fx.profiling.channel_ranges import ChannelRanges
from gact_fx.profiling.neighbours import STEP_BITS, rounded_up
from gact_fx.records import Sensitivity

# The width and group size that c_l is quoted at.
REFERENCE = Code(4, "stochastic", 256)
# Positions between codes are resolved by values that were stored in this many bits more, or exactly.
MARGIN = 2
# What a squared bias counts beside a variance: averages over steps, momentum's over ten or so, leave it as it is.
BIAS_WEIGHT = 10.0
FINEST = 6
# Mantissa of the stored step of a group with a code for a mask, the leading bit included.
MERGED_STEP_BITS = 5
_CELL = 32
_BLOCK = 1024
_MAX_BLOCKS = 32


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
        flat = values.detach().reshape(-1).float()
        self._all = _Weighed(flat)
        self._passed = None if stopped is None else _Weighed(flat, stopped.mask.reshape(-1))
        self._channels = ChannelRanges(values) if bits is not None and ChannelRanges.reads(values) else None
        self._is_lossless = stopped is not None and stopped.error is None
        self._bias = 0.0
        self._count = 0
        self._is_even = False

    def add(self, sensitivity: torch.Tensor, stopped: Stopped | None = None) -> None:
        """Add one probe's derivative of the gradient with respect to the values, in the same order.

        ``stopped`` is what the meter was made with.
        """
        squares = sensitivity.detach().reshape(-1).float().square()
        self._all.add(squares)
        if self._channels is not None:
            self._channels.add(squares)
        if self._passed is not None and stopped is not None:
            self._passed.add(squares.masked_fill(stopped.mask.reshape(-1), 0))
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

    def _each(self) -> "list[_Weighed | ChannelRanges]":
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


class _Weighed:
    """Ranges of a tensor's cells and the weights of its elements: of all, or of those that a mask does not stop."""

    def __init__(self, flat: torch.Tensor, stopped: torch.Tensor | None = None) -> None:
        whole = _padded(flat, flat[-1]).view(-1, _CELL)
        blocks = whole.view(-1, _BLOCK)
        count = min(len(blocks), _MAX_BLOCKS)
        self._sampled = torch.linspace(0, len(blocks) - 1, count, device=flat.device).long()
        self._block_values = self._block_lows = self._block_highs = blocks[self._sampled]
        self._block_passes = torch.ones_like(self._block_values, dtype=torch.bool)
        if stopped is None:
            self._low, self._high = whole.amin(1), whole.amax(1)
            self._passes = torch.full((), _CELL, device=flat.device).expand(self._low.shape)
        else:
            out = _padded(stopped, torch.ones((), dtype=torch.bool, device=flat.device)).view(-1, _CELL)
            self._low = whole.masked_fill(out, math.inf).amin(1)
            self._high = whole.masked_fill(out, -math.inf).amax(1)
            self._passes = _CELL - out.sum(1, dtype=torch.uint8)
            outside = out.view(-1, _BLOCK)[self._sampled]
            self._block_lows = self._block_values.masked_fill(outside, math.inf)
            self._block_highs = self._block_values.masked_fill(outside, -math.inf)
            self._block_passes = ~outside
        self._numel = flat.numel()
        self._weights = torch.zeros_like(self._low)
        self._block_weights = torch.zeros_like(self._block_values)

    def add(self, squares: torch.Tensor) -> None:
        """What is stopped must have none."""
        cells = _padded(squares, torch.zeros((), device=squares.device)).view(-1, _CELL)
        self._weights += cells.sum(1)
        self._block_weights += cells.view(-1, _BLOCK)[self._sampled]

    @property
    def is_unknown(self) -> bool:
        return bool(self._weights.isnan().any())

    def scale(self, factor: float) -> None:
        self._weights *= factor
        self._block_weights *= factor

    def weigh_equally(self) -> None:
        self._weights.copy_(self._passes)
        self._block_weights.copy_(self._block_passes)

    def variances(self, sizes: Sequence[int], finest: int, probes: int, *, merged: bool = False) -> dict[Code, float]:
        """What codes of every width, rounding and size of groups add; ``merged``: one of the codes is for a mask."""
        found: dict[Code, float] = {}
        bfloat16 = self._bfloat16(probes)
        for size in sizes:
            whole, sampled, stochastic = self._spread(size, finest, probes, merged)
            for bits in WIDTHS[merged:]:
                is_known = sampled > 0 and finest > merged
                # A sixth is the mean of p (1 - p) over positions.
                share = stochastic[min(bits, finest)] / sampled if is_known else 1 / 6
                variance = whole * step_variance(bits, merged=merged)
                found[Code(bits, "stochastic", size)] = variance * share
                found[Code(bits, "dither", size)] = variance / 12
            if not merged and sampled > 0:
                for bits, added in self._rotated(size, probes).items():
                    found[Code(bits, "rotated", size)] = added * whole / sampled
            if not merged:
                # Groups do not matter there, but a choice has one.
                found[Code(BFLOAT16_BITS, "stochastic", size)] = bfloat16 * (whole / sampled if sampled > 0 else 1.0)
        return found

    def _spread(self, size: int, finest: int, probes: int, merged: bool) -> tuple[float, float, dict[int, float]]:
        """Sums of weight times squared range over the tensor and over the blocks, and of weight times squared range
        times ``p (1 - p)`` over the blocks for every width up to the finest that the values resolve.
        """
        whole = float(self._by_group(size).sum()) / max(probes, 1)
        values, inner = self._block_values.view(-1, size), self._block_weights.view(-1, size)
        low = self._block_lows.view(-1, size).amin(1, keepdim=True)
        span = (self._block_highs.view(-1, size).amax(1, keepdim=True) - low).clamp(min=0)
        scaled = inner * span.square() / max(probes, 1)
        widths = range(1 + merged, finest + 1)
        levels = torch.tensor([2**bits - 1 - merged for bits in widths], dtype=span.dtype, device=span.device)
        # Where most values are the largest but for a few, most of what is added comes of the rounding of the step.
        steps = rounded_up(span / levels.view(-1, 1, 1), MERGED_STEP_BITS if merged else STEP_BITS)
        p = torch.where(steps > 0, (values - low) / steps, 0).frac_()
        sums = torch.addcmul(p, p, p, value=-1).mul_(scaled).sum(2).double().sum(1)
        stochastic = dict(zip(widths, sums.tolist(), strict=True))
        return whole, float(scaled.sum(dtype=torch.float64)), stochastic

    def _rotated(self, size: int, probes: int) -> dict[int, float]:
        """By bits, what rotated codes add on the blocks; groups in which an element sticks out have dither."""
        values = self._block_values.view(-1, size)
        squares = values.sub(values.mean(1, keepdim=True)).square()
        weights = self._block_weights.view(-1, size).sum(1).double() / max(probes, 1)
        largest, norms = squares.amax(1), squares.sum(1)
        ranges = (values.amax(1) - values.amin(1)).double().square()
        return {
            bits: float((torch.where(
                largest > MOST_OF_NORM[bits] * norms, ranges * step_variance(bits) / 12, norms.double() * share / size
            ) * weights).sum())
            for bits, share in ROTATED_VARIANCES.items()
        }  # fmt: skip

    def _by_group(self, size: int) -> torch.Tensor:
        """Weight times squared range of every group."""
        cells = size // _CELL
        # Where a mask stops all, there is no range.
        ranges = (self._high.view(-1, cells).amax(1) - self._low.view(-1, cells).amin(1)).clamp(min=0)
        return self._weights.view(-1, cells).sum(1).double() * ranges.double().square()

    def places(self, sizes: Sequence[int], probes: int, row_numel: int) -> dict[int, Places]:
        """By size, weight times squared range of the groups of a row, of `MOST_ROWS` sums of rows at most.

        Of sizes that rows have a whole number of.
        """
        if row_numel == 0 or self._numel % row_numel:
            return {}
        found = {}
        for size in sizes:
            count = row_numel // size
            if row_numel % size or count < 2:
                continue
            rows = self._by_group(size)[: self._numel // size].view(-1, count) / max(probes, 1)
            several = torch.stack([rows[at::MOST_ROWS].sum(0) for at in range(min(len(rows), MOST_ROWS))])
            block_size = Places(count, ()).block_size
            # A loop over blocks would be most of what measuring calls.
            missing = -count % block_size
            sums = F.pad(several, (0, missing)).view(len(several), -1, block_size).sum(2)
            sums[:, -1] *= block_size / (block_size - missing)
            means = sums / block_size
            found[size] = Places(count, tuple(map(tuple, means.tolist())))
        return found

    def _bfloat16(self, probes: int) -> float:
        """Values between two bfloat16 numbers: a sixth of their squared distance, in the mean over positions."""
        spacing = torch.frexp(self._block_values)
        distance = torch.ldexp(torch.ones_like(spacing.mantissa), spacing.exponent - 8)
        distance = torch.where(self._block_values == 0, 0, distance)
        weighted = self._block_weights.double() * distance.double().square()
        return float(weighted.sum()) / 6 / max(probes, 1)


def _padded(flat: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    missing = -flat.numel() % _BLOCK
    return torch.cat([flat, value.expand(missing).to(flat.dtype)]) if missing else flat
