"""Widths by place: the groups of a row, one behind the other, have codes of different widths, the same in every row.

They are written run by run: "8 4x2 2" for rows of four groups, of which the first has 8 bits, the next two 4, and the
last 2. A blob has the groups of a run, of all rows, as a blob of their own; run after run.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise

from gact_fx.errors import UsageError


@dataclass(frozen=True)
class Run:
    """Neighbouring groups of a row with codes of one width: ``count`` from the group ``first`` on."""

    first: int
    count: int
    bits: int

    def overlap(self, start: int, end: int) -> int:
        """How many of the groups from ``start`` on, up to ``end``, it has."""
        return max(min(end, self.first + self.count) - max(start, self.first), 0)


@lru_cache(maxsize=4096)
def runs_of(by_place: str) -> tuple[Run, ...]:
    """The runs, in order.

    Raises:
        UsageError: ``by_place`` is not written as above.
    """
    runs: list[Run] = []
    for part in by_place.split(" ") if by_place else ():
        digit, times, count = part.partition("x")
        is_count = count.isascii() and count.isdecimal() and int(count) > 0
        if digit not in list("12345678") or (times and not is_count):
            raise UsageError(f"gact_fx: by_place must be like '8 2x15', of widths from 1 to 8, got {by_place!r}")
        first = runs[-1].first + runs[-1].count if runs else 0
        runs.append(Run(first, int(count or 1), int(digit)))
    return tuple(runs)


def written(widths: Iterable[tuple[int, int]]) -> str:
    """How widths are written, which are given as bits and the number of groups that have them."""
    merged = [(bits, sum(count for _, count in same)) for bits, same in groupby(widths, key=lambda pair: pair[0])]
    return " ".join(f"{bits}x{count}" if count > 1 else str(bits) for bits, count in merged)


def count_places(by_place: str) -> int:
    """The number of groups in a row."""
    return sum(run.count for run in runs_of(by_place))


def mean_bits(by_place: str) -> float:
    """The mean of the widths."""
    return sum(run.bits * run.count for run in runs_of(by_place)) / count_places(by_place)


def picture(by_place: str, most: int = 24) -> str:
    """A block for each place, as high as its codes are wide; of more than ``most`` places one for several."""
    places = count_places(by_place)
    ends = [places * at // min(places, most) for at in range(min(places, most) + 1)] if places else []
    heights = []
    for start, end in pairwise(ends):
        inside = sum(run.bits * run.overlap(start, end) for run in runs_of(by_place))
        heights.append(round(inside / (end - start)))
    return "".join("▁▂▃▄▅▆▇█"[height - 1] for height in heights)
