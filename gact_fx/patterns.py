"""Patterns: more bits for the groups of a row, at the same place in every row, whose errors count for more.

With m_p the weight of the groups at place p, a width b_p there adds ``sum_p m_p S(b_p)``. For a price of a bit every
place has its best width (Lagrangian relaxation, as in `allocate_bits`), and a row of prices gives a row of patterns.

A pattern may be an accident of the rows that were measured. So these are taken in two halves, and what a pattern adds
is judged by what the pattern of either half would add to the other. Neighbouring places that differ least share a
width: that leaves less to chance, and few runs of groups, each of which costs a call.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from gact_fx.codec.by_place import count_places, runs_of, written
from gact_fx.codec.code import WIDTHS, step_variance

# Pieces of a row with one width each.
MOST_PIECES = 32
# Rows, and blocks of neighbouring places, that are told apart.
MOST_ROWS, MOST_BLOCKS = 8, 512
# What counts for less than this share of the mean when it is measured may count for more later.
FLOOR = 1e-2
# How many blocks, and the mean of their weights.
Piece = tuple[int, float]
# Bits, and how many blocks have them.
Width = tuple[int, int]


@dataclass(frozen=True)
class Places:
    """What the groups of a row count for, of which there are ``count``.

    ``rows`` has it for several rows, in blocks of `block_size` neighbouring groups, of which the last may be smaller.
    Only ratios say something.
    """

    count: int
    rows: tuple[tuple[float, ...], ...]

    @property
    def block_size(self) -> int:
        return -(-self.count // MOST_BLOCKS)

    def written(self, widths: Sequence[Width]) -> str:
        """``widths``, which are given by blocks, as codes have them."""
        missing = self.block_size * sum(count for _, count in widths) - self.count
        places = [(bits, self.block_size * count) for bits, count in widths]
        return written([*places[:-1], (places[-1][0], places[-1][1] - missing)])


@dataclass(frozen=True)
class Pattern:
    """Widths by place, and which share of the tensor's variance, at equal widths, is that of the groups of a width."""

    by_place: str
    shares: dict[int, float]


@lru_cache(maxsize=4096)
def list_patterns(places: Places, least: int = 1) -> Sequence[Pattern]:
    """Patterns of several widths of ``least`` bits and more, from few bits to many.

    There are none for fewer than two rows, which leave nothing to judge them by. Plans are made several times of what
    was measured once, so patterns are remembered.
    """
    if len(places.rows) < 2 or places.count < 2:
        return []
    halves = [
        [math.fsum(column) / len(half) for column in zip(*half, strict=True)]
        for half in (places.rows[::2], places.rows[1::2])
    ]
    both = [sum(pair) / 2 for pair in zip(*halves, strict=True)]
    total = sum(both)
    # Rows that count for nothing, such as those that a loss leaves out, tell no places apart.
    if not all(0 < sum(half) < math.inf for half in halves):
        return []
    pieces = [_pieces(found) for found in (both, *halves)]
    patterns: list[Pattern] = []
    for price in _prices(least):
        chosen, *of_halves = (_widths(found, price * total / len(both), least) for found in pieces)
        by_place = places.written(chosen)
        if len({bits for bits, _ in chosen}) < 2 or (patterns and patterns[-1].by_place == by_place):
            continue
        shares = dict.fromkeys(range(least, WIDTHS[-1] + 1), 0.0)
        # The pattern of either half on the other one, with what it has in bits more than the one of both.
        for widths, judge in zip(of_halves, reversed(halves), strict=True):
            excess, first = 4.0 ** (_mean(widths) - _mean(chosen)), 0
            for bits, count in widths:
                shares[bits] += excess * sum(judge[first : first + count]) / (2 * total)
                first += count
        patterns.append(Pattern(by_place, _used(shares)))
    return patterns


def shares_by_width(places: Places, by_place: str) -> dict[int, float] | None:
    """By width, the share that its groups have in what codes of one width would add; None where rows do not fit.

    Of a pattern that was chosen on these very rows it is as the pattern was judged.
    """
    total = sum(map(sum, places.rows))
    if not 0 < total < math.inf or places.count != count_places(by_place):
        return None
    for least in range(1, min(run.bits for run in runs_of(by_place)) + 1):
        for pattern in list_patterns(places, least):
            if pattern.by_place == by_place:
                return pattern.shares
    shares = {run.bits: 0.0 for run in runs_of(by_place)}
    size = places.block_size
    for block, weights in enumerate(zip(*places.rows, strict=True)):
        start, end = block * size, min((block + 1) * size, places.count)
        for run in runs_of(by_place):
            shares[run.bits] += run.overlap(start, end) / (end - start) * sum(weights) / total
    return _used(shares)


def _used(shares: Mapping[int, float]) -> dict[int, float]:
    """Without the widths that nothing has: what codes of them would add may be infinite."""
    return {bits: share for bits, share in shares.items() if share > 0}


def _mean(widths: Sequence[Width]) -> float:
    return sum(bits * count for bits, count in widths) / sum(count for _, count in widths)


def _prices(least: int) -> list[float]:
    """Of a bit, relative to the mean weight: those at which the mean place changes its width, and some between."""
    gains = _gains(least)
    between = [math.sqrt(a * b) for a, b in pairwise(gains)]
    return sorted([*gains, *between], reverse=True)


@lru_cache
def _gains(least: int) -> tuple[float, ...]:
    """What one more bit gains at ``least`` bits, and at every width above: the more bits, the less."""
    return tuple(step_variance(bits) - step_variance(bits + 1) for bits in range(least, WIDTHS[-1]))


def _widths(pieces: Sequence[Piece], price: float, least: int) -> list[Width]:
    """The best width of every piece."""
    floor = FLOOR * sum(count * weight for count, weight in pieces) / sum(count for count, _ in pieces)
    gains = _gains(least)
    return [(least + sum(max(weight, floor) * gain > price for gain in gains), count) for count, weight in pieces]


def _pieces(weights: Sequence[float]) -> list[Piece]:
    """Neighbouring blocks as `MOST_PIECES` pieces at most.

    Those are joined first that lose least by one width, which is half the logarithm of a weight in bits.
    """
    floor = FLOOR * sum(weights) / len(weights)
    counts, sums = [1] * len(weights), [max(weight, floor) for weight in weights]
    entropies = [math.log(total) for total in sums]
    behind, before = list(range(1, len(weights) + 1)), list(range(-1, len(weights) - 1))
    version = [0] * len(weights)

    def joined(at: int, other: int) -> float:
        count, total = counts[at] + counts[other], sums[at] + sums[other]
        return count * math.log(total / count)

    def loss(at: int) -> tuple[float, int, int, int]:
        other = behind[at]
        lost = joined(at, other) - entropies[at] - entropies[other]
        return lost, at, version[at], version[other]

    heap = [loss(at) for at in range(len(weights) - 1)]
    heapq.heapify(heap)
    left = len(weights)
    while left > MOST_PIECES:
        _, at, mine, others = heapq.heappop(heap)
        other = behind[at]
        if not counts[at] or other == len(weights) or version[at] != mine or version[other] != others:
            continue
        entropies[at] = joined(at, other)
        counts[at], sums[at] = counts[at] + counts[other], sums[at] + sums[other]
        counts[other], behind[at] = 0, behind[other]
        version[at], version[other], left = version[at] + 1, version[other] + 1, left - 1
        if behind[at] < len(weights):
            before[behind[at]] = at
            heapq.heappush(heap, loss(at))
        if before[at] >= 0:
            heapq.heappush(heap, loss(before[at]))
    return [(count, total / count) for count, total in zip(counts, sums, strict=True) if count]
