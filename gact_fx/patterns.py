"""Patterns: more bits for the groups of a row, at the same place in every row, whose errors count for more.

With m_p the weight of the groups at place p, a width b_p there adds ``sum_p m_p S(b_p)``. For a price of a bit every
place has its best width (Lagrangian relaxation, as in `allocate_bits`), and a row of prices gives a row of patterns.

A pattern may be an accident of the rows that were measured. So these are taken in two halves, and what a pattern adds
is judged by what the pattern of either half would add to the other. Neighbouring places that differ least share a
width: that leaves less to chance, and few runs of groups, each of which costs a call.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from gact_fx.codec.by_place import mean_bits
from gact_fx.codec.code import WIDTHS, step_variance

# Pieces of a row with one width each, and places that are looked at one by one.
MOST_PIECES, MOST_PLACES = 32, 512
# What counts for less than this share of the mean when it is measured may count for more later.
FLOOR = 1e-2
Piece = tuple[int, float]
# What the groups of a row count for, for every row.
Places = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Pattern:
    """Widths by place, and which share of the tensor's variance, at equal widths, is that of the groups of a width."""

    by_place: str
    shares: dict[int, float]


@lru_cache(maxsize=4096)
def list_patterns(weights: Places, least: int = 1) -> Sequence[Pattern]:
    """Patterns of several widths of ``least`` bits and more, from few bits to many.

    ``weights``: what the groups of every row count for. There are none for fewer than two rows, which leave nothing to
    judge them by. Plans are made several times of what was measured once, so patterns are remembered.
    """
    rows, places = len(weights), len(weights[0])
    if rows < 2 or places < 2:
        return []
    halves = [
        [math.fsum(column) / len(half) for column in zip(*half, strict=True)] for half in (weights[::2], weights[1::2])
    ]
    both = [sum(pair) / 2 for pair in zip(*halves, strict=True)]
    total = sum(both)
    if not 0 < total < math.inf:
        return []
    pieces = [_pieces(found) for found in (both, *halves)]
    patterns: list[Pattern] = []
    for price in _prices(least):
        chosen, *of_halves = (_widths(found, price * total / places, least) for found in pieces)
        if len(set(chosen)) < 2 or (patterns and patterns[-1].by_place == chosen):
            continue
        shares = dict.fromkeys(range(least, WIDTHS[-1] + 1), 0.0)
        # The pattern of either half on the other one, with what it has in bits more than the one of both.
        for by_place, judge in zip(of_halves, reversed(halves), strict=True):
            excess = 4.0 ** (mean_bits(by_place) - mean_bits(chosen))
            for digit, weight in zip(by_place, judge, strict=True):
                shares[int(digit)] += excess * weight / (2 * total)
        patterns.append(Pattern(chosen, shares))
    return patterns


def shares_by_width(weights: Places, by_place: str) -> dict[int, float] | None:
    """By width, the share that its groups have in what codes of one width would add; None where rows do not fit.

    Of a pattern that was chosen on these very rows it is as the pattern was judged.
    """
    total = sum(map(sum, weights))
    if not 0 < total < math.inf or len(weights[0]) != len(by_place):
        return None
    for least in range(1, int(min(by_place)) + 1):
        for pattern in list_patterns(weights, least):
            if pattern.by_place == by_place:
                return pattern.shares
    shares = dict.fromkeys(map(int, by_place), 0.0)
    for row in weights:
        for digit, weight in zip(by_place, row, strict=True):
            shares[int(digit)] += weight / total
    return shares


def _prices(least: int) -> list[float]:
    """Of a bit, relative to the mean weight: those at which the mean place changes its width, and some between."""
    gains = [step_variance(bits) - step_variance(bits + 1) for bits in range(least, WIDTHS[-1])]
    between = [math.sqrt(a * b) for a, b in pairwise(gains)]
    return sorted([*gains, *between], reverse=True)


def _widths(pieces: Sequence[Piece], price: float, least: int) -> str:
    floor = FLOOR * sum(count * weight for count, weight in pieces) / sum(count for count, _ in pieces)
    digits = []
    for count, weight in pieces:
        counted = max(weight, floor)
        best = min(range(least, WIDTHS[-1] + 1), key=lambda bits: counted * step_variance(bits) + price * bits)
        digits.append(str(best) * count)
    return "".join(digits)


def _pieces(weights: Sequence[float]) -> list[Piece]:
    """Neighbouring places as `MOST_PIECES` pieces at most: how many places, and the mean of their weights.

    Those are joined first that lose least by one width, which is half the logarithm of a weight in bits.
    """
    width = -(-len(weights) // MOST_PLACES)
    parts = [weights[first : first + width] for first in range(0, len(weights), width)]
    floor = FLOOR * sum(weights) / len(weights)
    counts = [len(part) for part in parts]
    sums = [math.fsum(max(weight, floor) for weight in part) for part in parts]
    behind = list(range(1, len(parts) + 1))
    before = list(range(-1, len(parts) - 1))
    version = [0] * len(parts)

    def entropy(count: int, total: float) -> float:
        return count * math.log(total / count)

    def loss(at: int) -> tuple[float, int, int, int]:
        other = behind[at]
        joined = entropy(counts[at] + counts[other], sums[at] + sums[other])
        lost = joined - entropy(counts[at], sums[at]) - entropy(counts[other], sums[other])
        return lost, at, version[at], version[other]

    heap = [loss(at) for at in range(len(parts) - 1)]
    heapq.heapify(heap)
    left = len(parts)
    while left > MOST_PIECES:
        _, at, mine, others = heapq.heappop(heap)
        other = behind[at]
        if not counts[at] or other == len(parts) or version[at] != mine or version[other] != others:
            continue
        counts[at], sums[at] = counts[at] + counts[other], sums[at] + sums[other]
        counts[other], behind[at] = 0, behind[other]
        version[at], version[other], left = version[at] + 1, version[other] + 1, left - 1
        if behind[at] < len(parts):
            before[behind[at]] = at
            heapq.heappush(heap, loss(at))
        if before[at] >= 0:
            heapq.heappush(heap, loss(before[at]))
    return [(count, total / count) for count, total in zip(counts, sums, strict=True) if count]
