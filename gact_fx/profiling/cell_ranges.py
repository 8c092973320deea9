"""Ranges of a tensor's elements in memory order, cell by cell, and how much the gradient minds errors in each cell.

A cell is a part of every group that codes may have. What depends on the position of values between codes is known of
some blocks of elements, which stand for all.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch.nn import functional as F

from gact_fx.codec.code import ROTATED_VARIANCES, WIDTHS, Code, step_variance
from gact_fx.codec.layout import BFLOAT16_BITS
from gact_fx.codec.rotation import MOST_OF_NORM
from gact_fx.patterns import MOST_ROWS, Places
from gact_fx.profiling.neighbours import STEP_BITS, rounded_up

# Elements, whole blocks of them, that are looked at together: more would take memory.
PIECE = 2**20
# Mantissa of the stored step of a group with a code for a mask, the leading bit included.
MERGED_STEP_BITS = 5
_CELL = 32
_BLOCK = 1024
_MAX_BLOCKS = 32


class CellRanges:
    """Ranges of a tensor's cells and the weights of its elements: of all, or of those that a mask does not stop."""

    def __init__(self, flat: torch.Tensor, stopped: torch.Tensor | None = None) -> None:
        # By piece, the blocks in it that stand for all, and how many there are in the pieces before.
        self._sampled = _sampled(len(flat), flat.device)
        self._starts = list(accumulate(map(len, self._sampled), initial=0))
        last, true = flat[-1].float(), torch.ones((), dtype=torch.bool, device=flat.device)
        lows, highs, passes, values, outside = [], [], [], [], []
        for first in range(0, len(flat), PIECE):
            cells = _padded(flat[first : first + PIECE].float(), last).view(-1, _CELL)
            values.append(cells.view(-1, _BLOCK)[self._sampled[first // PIECE]])
            if stopped is None:
                lows.append(cells.amin(1))
                highs.append(cells.amax(1))
                continue
            out = _padded(stopped[first : first + PIECE], true).view(-1, _CELL)
            lows.append(cells.masked_fill(out, math.inf).amin(1))
            highs.append(cells.masked_fill(out, -math.inf).amax(1))
            passes.append(_CELL - out.sum(1, dtype=torch.uint8))
            outside.append(out.view(-1, _BLOCK)[self._sampled[first // PIECE]])
        self._low, self._high, self._block_values = torch.cat(lows), torch.cat(highs), torch.cat(values)
        self._block_lows = self._block_highs = self._block_values
        if stopped is None:
            self._passes = torch.full((), _CELL, device=flat.device).expand(self._low.shape)
            self._block_passes = torch.ones_like(self._block_values, dtype=torch.bool)
        else:
            self._passes, self._block_passes = torch.cat(passes), ~torch.cat(outside)
            self._block_lows = self._block_values.masked_fill(~self._block_passes, math.inf)
            self._block_highs = self._block_values.masked_fill(~self._block_passes, -math.inf)
        self._numel = flat.numel()
        self._weights = torch.zeros_like(self._low)
        self._block_weights = torch.zeros_like(self._block_values)

    def add(self, squares: torch.Tensor, first: int) -> None:
        """Add those of the piece that begins with element ``first``; what is stopped must have none."""
        cells = _padded(squares, torch.zeros((), device=squares.device)).view(-1, _CELL)
        self._weights[first // _CELL :][: len(cells)] += cells.sum(1)
        piece = first // PIECE
        inside, start = self._sampled[piece], self._starts[piece]
        self._block_weights[start : start + len(inside)] += cells.view(-1, _BLOCK)[inside]

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


def _sampled(numel: int, device: torch.device) -> list[torch.Tensor]:
    blocks, in_piece = math.ceil(numel / _BLOCK), PIECE // _BLOCK
    chosen = torch.linspace(0, blocks - 1, min(blocks, _MAX_BLOCKS)).long()
    counts = torch.bincount(chosen // in_piece, minlength=math.ceil(blocks / in_piece)).tolist()
    return [part.to(device) - in_piece * piece for piece, part in enumerate(chosen.split(counts))]


def _padded(flat: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    missing = -flat.numel() % _BLOCK
    return torch.cat([flat, value.expand(missing).to(flat.dtype)]) if missing else flat
