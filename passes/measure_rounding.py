"""Measure what every way of storing a tensor would add to the variance of the gradient.

With a_i the mean squared sensitivity of the gradient to element i (`measure_adjoint`), codes with independent errors
add ``sum_i a_i var_i``. The variance of an error is known for every rounding: ``step^2 p (1 - p)`` for stochastic
rounding of a value that lies p steps above a code, ``step^2 / 12`` for subtractive dither, where a step is the range
of the group over ``2^bits - 1``. So nothing is drawn: ranges and weights are summed over the whole tensor, and what
depends on p is evaluated on blocks of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from gact_fx.codec_layout import BFLOAT16_BITS
from gact_fx.records import Code, Sensitivity

WIDTHS = tuple(range(1, 9))
# The width and group size that c_l is quoted at.
REFERENCE: Code = (4, "stochastic", 256)
# Positions between codes are resolved by values that were stored in this many bits more, or exactly.
MARGIN = 2
FINEST = 6
_CELL = 32
_BLOCK = 1024
_MAX_BLOCKS = 32


def step_variance(bits: int) -> float:
    """S(b) = 1 / (2^b - 1)^2: the variance of b-bit codes relative to the squared range (GACT, equation 4)."""
    levels: int = 2**bits - 1
    return 1.0 / levels**2


def code_bits(reading: fx.Node) -> int | None:
    """The width of the codes that a node with a saved tensor's values decompresses, None where it has them exactly."""
    if reading.target is not torch.ops.gact_fx.decompress.default:
        return None
    bits = reading.args[3]
    assert isinstance(bits, int)
    return bits


class RoundingMeter:
    """Collects the squared sensitivities of one tensor's elements, without keeping them all.

    ``values`` are the tensor's values in memory order, whose groups are those of the codes. ``bits`` is the width of
    the codes that they were read from, None where they are exact: between finer codes their positions say nothing.
    """

    def __init__(self, values: torch.Tensor, bits: int | None = None) -> None:
        self._finest = FINEST if bits is None else max(min(bits - MARGIN, FINEST), 0)
        flat = values.detach().reshape(-1).float()
        self._numel = flat.numel()
        whole = _padded(flat, flat[-1]).view(-1, _CELL)
        self._low, self._high = whole.amin(1), whole.amax(1)
        self._weights = torch.zeros_like(self._low)
        blocks = whole.view(-1, _BLOCK)
        count = min(len(blocks), _MAX_BLOCKS)
        self._sampled = torch.linspace(0, len(blocks) - 1, count, device=flat.device).long()
        self._block_values = blocks[self._sampled]
        self._block_weights = torch.zeros_like(self._block_values)
        self._count = 0

    def add(self, sensitivity: torch.Tensor) -> None:
        """Add one probe's derivative of the gradient with respect to the values, in the same order."""
        squares = _padded(sensitivity.detach().reshape(-1).float().square(), torch.zeros((), device=self._low.device))
        self._weights += squares.view(-1, _CELL).sum(1)
        self._block_weights += squares.view(-1, _BLOCK)[self._sampled]
        self._count += 1

    def divide(self, holders: int) -> None:
        """Take for this tensor one of ``holders`` equal parts of what was added."""
        self._weights /= holders
        self._block_weights /= holders

    def weigh_equally(self) -> None:
        """Forget the sensitivities; every element counts alike."""
        self._weights.fill_(_CELL)
        self._block_weights.fill_(1.0)
        self._count = 1

    def result(self, group_sizes: Sequence[int], value: float | None = None) -> Sensitivity:
        """What codes of every width, rounding and group size add.

        ``value``: c_l where it is known from elsewhere; the rest is then scaled to it.
        """
        variances: dict[Code, float] = {}
        bfloat16 = self._bfloat16()
        for size in sorted({*group_sizes, REFERENCE[2]}):
            whole, sampled, stochastic = self._spread(size)
            for bits in WIDTHS:
                is_known = sampled > 0 and self._finest > 0
                # A sixth is the mean of p (1 - p) over positions.
                share = stochastic[min(bits, self._finest) - 1] / sampled if is_known else 1 / 6
                variances[bits, "stochastic", size] = whole * share * step_variance(bits)
                variances[bits, "dither", size] = whole / 12 * step_variance(bits)
            # Groups do not matter there, but a choice has one.
            variances[BFLOAT16_BITS, "stochastic", size] = bfloat16 * (whole / sampled if sampled > 0 else 1.0)
        found = variances[REFERENCE] / step_variance(REFERENCE[0])
        if value is not None and found > 0:
            variances = {code: variance * value / found for code, variance in variances.items()}
        return Sensitivity(found if value is None else value, variances)

    def _spread(self, size: int) -> tuple[float, float, list[float]]:
        """Sums of weight times squared range over the tensor and over the blocks, and of weight times squared range
        times ``p (1 - p)`` over the blocks for every width up to the finest that the values resolve.
        """
        cells = size // _CELL
        ranges = self._high.view(-1, cells).amax(1) - self._low.view(-1, cells).amin(1)
        weights = self._weights.view(-1, cells).sum(1)
        whole = float((weights.double() * ranges.double().square()).sum()) / max(self._count, 1)
        values, inner = self._block_values.view(-1, size), self._block_weights.view(-1, size)
        low = values.amin(1, keepdim=True)
        span = values.amax(1, keepdim=True) - low
        scaled = inner * span.square() / max(self._count, 1)
        position = torch.where(span > 0, (values - low) / span, 0)
        stochastic = []
        for bits in range(1, self._finest + 1):
            p = (position * (2**bits - 1)).frac()
            stochastic.append(float(torch.addcmul(p, p, p, value=-1).mul_(scaled).sum(dtype=torch.float64)))
        return whole, float(scaled.sum(dtype=torch.float64)), stochastic

    def _bfloat16(self) -> float:
        """Values between two bfloat16 numbers: a sixth of their squared distance, in the mean over positions."""
        spacing = torch.frexp(self._block_values)
        distance = torch.ldexp(torch.ones_like(spacing.mantissa), spacing.exponent - 8)
        distance = torch.where(self._block_values == 0, 0, distance)
        weighted = self._block_weights.double() * distance.double().square()
        return float(weighted.sum()) / 6 / max(self._count, 1)


def _padded(flat: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    missing = -flat.numel() % _BLOCK
    return torch.cat([flat, value.expand(missing).to(flat.dtype)]) if missing else flat
