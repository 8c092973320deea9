"""Allocate bits to saved tensors: one choice for each from its menu, by bytes and by variance added to the gradient.

Minimises the total variance within a budget of bytes (GACT, Liu et al., ICML 2022, section 4.2), or the total bytes
within a bound on the variance. Either is a multiple-choice knapsack problem (Sinha & Zoltners, Operations Research
27(3), 1979). Its linear relaxation is solved by the steps along every menu's lower convex hull, the largest gain for
its cost first; where a step fits no more, the relaxation takes a part of it. What is returned is never worse than the
relaxation by more than the gain of that one step, and never gets worse when the limit is raised.
"""

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from gact_fx.codec.code import Code
from gact_fx.errors import UsageError

# Totals of variances are compared to this relative accuracy, so that a bound that is itself such a total can be met
# in whatever order it was summed.
ROUNDING_ERROR = 1e-12


@dataclass(frozen=True)
class Choice:
    """One way to store a tensor: its code (None: kept exact), the bytes that it costs, the variance that it adds to the
    gradient, whether the codes tell a mask as well, and what they are codes of (`TensorPlan`)."""

    code: Code | None
    nbytes: int
    variance: float
    merged: bool = False
    stored: str = "values"

    @property
    def bits(self) -> int | None:
        """Width of the code, None where kept exact."""
        return None if self.code is None else self.code.bits


Menu = Sequence[Choice]
# A choice as (cost, loss): the one is limited, the other minimised. Points of a menu: costs ascend, losses descend.
Point = tuple[float, float]


def allocate_bits(menus: Sequence[Menu], budget_bytes: float) -> list[Choice]:
    """A choice from every menu: the least total variance within ``budget_bytes``, to within one tensor's step.

    Where even the cheapest choice of every menu is over the budget: the cheapest of every menu.
    """
    _check("allocate_bits", menus, "budget_bytes", budget_bytes)
    efficient = [_efficient(menu) for menu in menus]
    chosen = _minimise([[(float(c.nbytes), c.variance) for c in menu] for menu in efficient], budget_bytes)
    return [menu[at] for menu, at in zip(efficient, chosen, strict=True)]


def fewest_bytes(menus: Sequence[Menu], max_variance: float) -> list[Choice]:
    """A choice from every menu: the fewest total bytes, to within one tensor's step, that add ``max_variance`` at most.

    Where that cannot be reached: the least variance of every menu.
    """
    _check("fewest_bytes", menus, "max_variance", max_variance)
    efficient = [_efficient(menu)[::-1] for menu in menus]
    points = [[(c.variance, float(c.nbytes)) for c in menu] for menu in efficient]
    chosen = _minimise(points, max_variance * (1 + ROUNDING_ERROR))
    return [menu[at] for menu, at in zip(efficient, chosen, strict=True)]


def _check(op: str, menus: Sequence[Menu], name: str, limit: float) -> None:
    if math.isnan(limit):
        raise UsageError(f"gact_fx.{op}: {name} must be a number, got {limit}; pass math.inf for no limit")
    for index, menu in enumerate(menus):
        if not menu:
            raise UsageError(f"gact_fx.{op}: every menu needs a choice, got none in menu {index}; leave the tensor out")
        for choice in menu:
            if not (0 <= choice.nbytes < math.inf and 0 <= choice.variance < math.inf):
                raise UsageError(
                    f"gact_fx.{op}: nbytes and variance must be finite and not negative, got {choice} in menu {index}; "
                    "leave the choice out"
                )


def _efficient(menu: Menu) -> list[Choice]:
    """The choices that no other beats in both bytes and variance, cheapest first."""
    kept: list[Choice] = []
    for choice in sorted(menu, key=lambda c: (c.nbytes, c.variance)):
        if not kept or choice.variance < kept[-1].variance:
            kept.append(choice)
    return kept


def _minimise(menus: list[list[Point]], limit: float) -> list[int]:
    """For every menu the index of its choice.

    The better of two: greedily adding to the cheapest of every menu, and greedily taking from the dearest of every
    menu, which keeps a large step where the former has spent its room on small ones.
    """
    if limit < _total(menus, [0] * len(menus), 0):
        return [0] * len(menus)
    added, _, _ = _Greedy(menus).run(limit)
    reverse = _Greedy([[(loss, cost) for cost, loss in reversed(menu)] for menu in menus]).least_cost(limit)
    taken = [len(menu) - 1 - at for menu, at in zip(menus, reverse, strict=True)]
    return min(added, taken, key=lambda chosen: _total(menus, chosen, 1))


class _Greedy:
    """Solutions for any limit: from the cheapest of every menu, always the step with the most gain for its cost."""

    def __init__(self, menus: list[list[Point]]) -> None:
        self.menus = menus
        hulls = [_hull(menu) for menu in menus]
        steps = sorted(
            (-_gain(menu[a], menu[b]), index, a, b)
            for index, (menu, hull) in enumerate(zip(menus, hulls, strict=True))
            for a, b in pairwise(hull)
        )
        self.steps = [(index, b) for _, index, _, b in steps]
        # Totals after so many steps. Both are summed from their small end: variances span many orders of magnitude.
        costs = [menus[index][b][0] - menus[index][a][0] for _, index, a, b in steps]
        losses = [menus[index][a][1] - menus[index][b][1] for _, index, a, b in reversed(steps)]
        self.costs = list(accumulate(costs, initial=math.fsum(menu[0][0] for menu in menus)))
        self.losses = list(accumulate(losses, initial=math.fsum(menu[-1][1] for menu in menus)))[::-1]

    def run(self, limit: float) -> tuple[list[int], float, float]:
        """The solution within ``limit``, its cost, and the next limit that may have another solution.

        Next is always the step, on the hull or not, with the most gain for its cost among those that fit. Where a
        higher limit lets another one fit, that has more gain for its cost than all that fit without it, and it costs
        more than all they may: the solution for a higher limit is never worse.
        """
        chosen = [0] * len(self.menus)
        # While the next step on the hulls fits, no step off them has more gain for its cost.
        for index, b in self.steps[: bisect_right(self.costs, limit) - 1]:
            chosen[index] = b
        left, following = limit - _total(self.menus, chosen, 0), math.inf
        # The first round goes nowhere and looks up the best step of every menu.
        heap = [(-math.inf, index, b) for index, b in enumerate(chosen)]
        while heap:
            _, index, b = heapq.heappop(heap)
            menu = self.menus[index]
            cost = menu[b][0] - menu[chosen[index]][0]
            # A step that no longer fits gives way to the best of the same menu that does.
            if cost <= left:
                left -= cost
                chosen[index] = b
            step, excess = _best_step(menu, chosen[index], left)
            following = min(following, limit + excess)
            if step is not None:
                heapq.heappush(heap, (-_gain(menu[chosen[index]], menu[step]), index, step))
        return chosen, _total(self.menus, chosen, 0), following

    def least_cost(self, max_loss: float) -> list[int]:
        """The solution at the least limit that brings the loss to ``max_loss`` or below."""
        reached = bisect_left(self.losses, -max_loss, key=lambda loss: -loss)
        low, high = self.costs[max(0, reached - 1)], self.costs[reached]
        best, _, _ = self.run(high)
        while low < high:
            middle = low + (high - low) / 2
            chosen, cost, following = self.run(middle)
            # Every limit from the cost of a solution to the following limit has the same solution.
            if _total(self.menus, chosen, 1) <= max_loss:
                best, high = chosen, min(cost, math.nextafter(middle, -math.inf))
            else:
                low = max(following, math.nextafter(middle, math.inf))
        return best


def _hull(menu: list[Point]) -> list[int]:
    """The indices of the points on the lower convex hull."""
    hull: list[int] = []
    for b, point in enumerate(menu):
        while len(hull) > 1 and _gain(menu[hull[-2]], menu[hull[-1]]) <= _gain(menu[hull[-1]], point):
            hull.pop()
        hull.append(b)
    return hull


def _best_step(menu: list[Point], at: int, left: float) -> tuple[int | None, float]:
    """Where the step leads that has the most gain for its cost within ``left``; by how much the next does not fit."""
    best, best_gain = None, -math.inf
    for b in range(at + 1, len(menu)):
        cost = menu[b][0] - menu[at][0]
        if cost > left:
            return best, cost - left
        gain = _gain(menu[at], menu[b])
        if gain > best_gain:
            best, best_gain = b, gain
    return best, math.inf


def _gain(cheap: Point, dear: Point) -> float:
    return (cheap[1] - dear[1]) / (dear[0] - cheap[0])


def _total(menus: list[list[Point]], chosen: list[int], axis: int) -> float:
    return math.fsum(menu[at][axis] for menu, at in zip(menus, chosen, strict=True))
