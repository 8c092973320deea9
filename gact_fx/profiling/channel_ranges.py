"""What codes add whose groups lie within a channel: ranges and weights of a tensor's cells, along the channels."""

import math
from collections.abc import Callable, Sequence

import torch

from gact_fx.codec.code import WIDTHS, Code, step_variance
from gact_fx.profiling.cell_ranges import PIECE

# Elements of a channel that are told apart no further, and those below which ranges say too little of a whole batch.
_CELL = 32
LEAST_LENGTH = 64


class ChannelRanges:
    """Squared sensitivities of one tensor's elements, and its ranges, by channel (the last dimension) and cell.

    ``values`` have the shape and order in which they lie in memory. They may be those of a few rows of the batch, with
    fewer elements of a channel than a group has in the whole one: what such groups add is taken to grow from size to
    size as it does up to the length that there is.
    """

    def __init__(self, values: torch.Tensor) -> None:
        flat = values.detach().reshape(-1, values.shape[-1])
        self._low = _by_cell(flat, torch.amin).float()
        self._high = _by_cell(flat, torch.amax).float()
        self._weights = torch.zeros_like(self._low)
        lengths = torch.full((len(self._low), 1), float(_CELL), device=flat.device)
        lengths[-1] = (len(flat) - 1) % _CELL + 1
        self._lengths = lengths

    @staticmethod
    def reads(values: torch.Tensor) -> bool:
        """Whether ``values`` have channels, and enough elements in each."""
        return values.dim() > 1 and values.shape[-1] > 1 and values.numel() >= LEAST_LENGTH * values.shape[-1]

    def add(self, sensitivity: torch.Tensor) -> None:
        """Add the squares of one probe's sensitivities, flat, in the order of the values."""
        rows = sensitivity.view(-1, self._low.shape[1])
        # Whole cells of about so many elements.
        length = math.ceil(PIECE / (_CELL * rows.shape[1])) * _CELL
        for first in range(0, len(rows), length):
            found = _by_cell(rows[first : first + length].float().square(), torch.sum)
            self._weights[first // _CELL :][: len(found)] += found

    def scale(self, factor: float) -> None:
        """Take so many times what was added."""
        self._weights *= factor

    def weigh_equally(self) -> None:
        """Forget the sensitivities; every element counts alike."""
        self._weights.copy_(self._lengths.expand_as(self._weights))

    def variances(self, sizes: Sequence[int], probes: int) -> dict[Code, float]:
        """What codes of every width, rounding and size of groups add; a sixth is the mean of p (1 - p)."""
        found: dict[Code, float] = {}
        for size in sizes:
            whole = self._grown(size) / max(probes, 1)
            for bits in WIDTHS:
                variance = whole * step_variance(bits)
                found[Code(bits, "stochastic", size, per_channel=True)] = variance / 6
                found[Code(bits, "dither", size, per_channel=True)] = variance / 12
        return found

    def _grown(self, size: int) -> float:
        """`_spread`, of groups that are longer than a channel as well."""
        longest = 2 ** (int(self._lengths.sum()).bit_length() - 1)
        if size <= longest:
            return self._spread(size)
        long, half = self._spread(longest), self._spread(longest // 2)
        return long * (long / half) ** math.log2(size / longest) if half > 0 else long

    def _spread(self, size: int) -> float:
        """The sum of weight times squared range over all groups."""
        cells = size // _CELL
        ranges = _by_group(self._high, cells).amax(1) - _by_group(self._low, cells).amin(1)
        # Every cell has the range of its group.
        spread = ranges.double().square().repeat_interleave(cells, 0)[: len(self._weights)]
        return float((self._weights.double() * spread).sum())


def _by_cell(flat: torch.Tensor, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
    """A row for every cell of elements, of which the last may have fewer."""
    whole = len(flat) // _CELL * _CELL
    rows = reduce(flat[:whole].view(-1, _CELL, flat.shape[1]), dim=1)
    return torch.cat([rows, reduce(flat[whole:], dim=0, keepdim=True)]) if whole < len(flat) else rows


def _by_group(rows: torch.Tensor, cells: int) -> torch.Tensor:
    """``rows`` in groups of so many; the last is filled up with its last row."""
    missing = -len(rows) % cells
    rows = torch.cat([rows, rows[-1:].expand(missing, -1)]) if missing else rows
    return rows.view(-1, cells, rows.shape[1])
