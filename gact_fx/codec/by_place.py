"""Widths by place: the groups of a row, one behind the other, have codes of different widths, the same in every row.

They are written as a digit for every group of a row, "8442" for rows of four groups. A blob has the groups of a run of
equal digits, of all rows, as a blob of their own; run by run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

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
        digit, _, count = part.partition("x")
        if digit not in list("12345678") or not (count or "1").isdecimal():
            raise UsageError(f"gact_fx.Plan: widths by place must be like '8 4x2', got {short!r}")
        digits.append(digit * int(count or 1))
    return "".join(digits)


def mean_bits(by_place: str) -> float:
    """The mean of the widths."""
    return sum(map(int, by_place)) / len(by_place)
