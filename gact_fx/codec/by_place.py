"""Widths by place: the groups of a row, one behind the other, have codes of different widths, the same in every row.

They are written as a digit for every group of a row, "8442" for rows of four groups. A blob has the groups of a run of
equal digits, of all rows, as a blob of their own; run by run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

from gact_fx.errors import UsageError


@dataclass(frozen=True)
class Run:
    """Neighbouring groups of a row with codes of one width: ``count`` from the group ``first`` on."""

    first: int
    count: int
    bits: int


def runs_of(by_place: str) -> Iterator[Run]:
    """The runs of equal digits, in order."""
    first = 0
    for digit, same in groupby(by_place):
        count = len(list(same))
        yield Run(first, count, int(digit))
        first += count


def shortened(by_place: str) -> str:
    """The digits as plans are saved with them: ``"8442"`` is ``"8 4x2 2"``."""
    return " ".join(f"{run.bits}x{run.count}" if run.count > 1 else str(run.bits) for run in runs_of(by_place))


def spelled_out(short: str) -> str:
    """The digits of what `shortened` gave.

    Raises:
        UsageError: it is nothing that `shortened` gives.
    """
    digits = []
    for part in short.split():
        digit, times, count = part.partition("x")
        if digit not in list("12345678") or (times and not count.isdecimal()):
            raise UsageError(f"gact_fx.Plan: widths by place must be like '8 4x2', got {short!r}")
        digits.append(digit * int(count or 1))
    return "".join(digits)


def picture(by_place: str, most: int = 24) -> str:
    """A block for each place, as high as its codes are wide; of more than ``most`` places one for several."""
    blocks = min(len(by_place), most)
    ends = [len(by_place) * at // blocks for at in range(blocks + 1)] if blocks else []
    parts = (by_place[start:end] for start, end in pairwise(ends))
    return "".join("▁▂▃▄▅▆▇█"[round(mean_bits(part)) - 1] for part in parts)


def mean_bits(by_place: str) -> float:
    """The mean of the widths."""
    return sum(map(int, by_place)) / len(by_place)
