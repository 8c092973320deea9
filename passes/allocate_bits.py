"""Allocate widths to saved tensors: the least gradient variance that fits the budget (GACT, section 4.2).

Minimises ``sum_l c_l S(b_l)`` subject to the bytes of all blobs, metadata included. Every tensor's menu of widths is
reduced to its convex hull of variance over bytes; then the step with the largest gain per byte is taken, until none
fits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gact_fx.codec_layout import blob_nbytes
from gact_fx.passes.measure_sensitivity import step_variance

WIDTHS = range(1, 9)
# Least sensitivity per element, relative to the median.
FLOOR = 1e-2


@dataclass(frozen=True)
class Item:
    """One tensor that wants a width. ``sensitivity`` None: unknown, taken as proportional to its elements.

    ``exact_nbytes``: what keeping it as it is holds (a view holds its whole storage), or None where that is not
    allowed.
    """

    numel: int
    dtype: torch.dtype
    sensitivity: float | None
    mask_numel: int = 0
    exact_nbytes: int | None = None
    min_bits: int = 1


@dataclass(frozen=True)
class Choice:
    """A width (None: kept exact), what it costs in bytes, and the variance it leaves."""

    bits: int | None
    nbytes: int
    variance: float


def allocate_bits(items: Sequence[Item], budget_bits: float, group_size: int) -> list[int | None]:
    """A width for every item, in order; ``budget_bits`` is the average per element, metadata and masks included.

    Where even the least width for every tensor is over the budget, that is what every tensor gets.
    """
    menus = [_convex_menu(_choices(item, sensitivity, group_size)) for item, sensitivity in _with_sensitivities(items)]
    chosen = [0] * len(items)
    left = budget_bits / 8 * sum(item.numel for item in items) - sum(menu[0].nbytes for menu in menus)
    heap = [_next_step(menu, 0, index) for index, menu in enumerate(menus) if len(menu) > 1]
    heapq.heapify(heap)
    while heap:
        _, index = heapq.heappop(heap)
        menu, at = menus[index], chosen[index]
        cost = menu[at + 1].nbytes - menu[at].nbytes
        if cost > left:
            continue
        left -= cost
        chosen[index] = at + 1
        if at + 2 < len(menu):
            heapq.heappush(heap, _next_step(menu, at + 1, index))
    return [menu[at].bits for menu, at in zip(menus, chosen, strict=True)]


def _with_sensitivities(items: Sequence[Item]) -> list[tuple[Item, float]]:
    items = [item if _is_finite(item.sensitivity) else replace(item, sensitivity=None) for item in items]
    known = [item.sensitivity / item.numel for item in items if item.sensitivity is not None]
    mean = sum(known) / len(known) if known and sum(known) > 0 else 1.0
    # What moves little when it is measured, most of all at initialisation, may move much later: sensitivities of
    # attention inputs were seen to grow a thousandfold in 200 steps. Far below the median none is believed.
    floor = FLOOR * (sorted(known)[len(known) // 2] if known else mean) or FLOOR * mean
    return [
        (item, item.numel * max(mean if item.sensitivity is None else item.sensitivity / item.numel, floor))
        for item in items
    ]


def _is_finite(sensitivity: float | None) -> bool:
    return sensitivity is not None and math.isfinite(sensitivity)


def _choices(item: Item, sensitivity: float, group_size: int) -> list[Choice]:
    choices = [
        Choice(
            bits,
            int(blob_nbytes(item.numel, item.dtype, bits, group_size, item.mask_numel)),
            sensitivity * step_variance(bits),
        )
        for bits in WIDTHS
        if bits >= item.min_bits
    ]
    if item.exact_nbytes is not None:
        choices.append(Choice(None, item.exact_nbytes, 0.0))
    return choices


def _convex_menu(choices: list[Choice]) -> list[Choice]:
    """The choices on the lower convex hull of variance over bytes, cheapest first."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.nbytes, c.variance)):
        if hull and choice.variance >= hull[-1].variance:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-2], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _gain(cheap: Choice, dear: Choice) -> float:
    return (cheap.variance - dear.variance) / (dear.nbytes - cheap.nbytes)


def _next_step(menu: list[Choice], at: int, index: int) -> tuple[float, int]:
    return -_gain(menu[at], menu[at + 1]), index
