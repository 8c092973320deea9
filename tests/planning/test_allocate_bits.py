import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gact_fx.codec.code import Code
from gact_fx.planning.allocate_bits import Choice, Menu, allocate_bits, fewest_bytes


def option(nbytes: int, variance: float) -> Choice:
    return Choice(Code(4), nbytes, variance)


def nbytes(choices: Sequence[Choice]) -> int:
    return sum(choice.nbytes for choice in choices)


def variance(choices: Sequence[Choice]) -> float:
    return math.fsum(choice.variance for choice in choices)


def steps(menu: Menu, cost: str, loss: str) -> list[float]:
    """By how much each step along the menu's lower convex hull lowers the loss: gift wrapping, from the cheapest."""
    points = sorted((getattr(choice, cost), getattr(choice, loss)) for choice in menu)
    at, gains = points[0], []
    while lower := [p for p in points if p[0] > at[0] and p[1] < at[1]]:
        following = min(lower, key=lambda p: ((p[1] - at[1]) / (p[0] - at[0]), p[0]))
        gains.append(at[1] - following[1])
        at = following
    return gains


def largest_step(menus: Sequence[Menu], cost: str, loss: str) -> float:
    return max((step for menu in menus for step in steps(menu, cost, loss)), default=0.0)


# Few values, for equal bytes, equal gains and choices that others beat; or many decades.
BYTES = st.integers(0, 12) | st.integers(0, 10**6)
VARIANCES = st.integers(0, 12).map(float) | st.floats(-15, 15).map(lambda exponent: 10.0**exponent)
MENUS = st.lists(st.lists(st.builds(option, BYTES, VARIANCES), min_size=1, max_size=5), min_size=1, max_size=5)
FRACTIONS = st.floats(0, 1)


@given(MENUS, FRACTIONS)
def test_within_the_budget_and_one_step_of_the_least_variance(menus: list[list[Choice]], fraction: float) -> None:
    everything = list(product(*menus))
    least, most = (f(map(nbytes, everything)) for f in (min, max))
    budget = least + fraction * (most - least)
    chosen = allocate_bits(menus, budget)
    assert all(choice in menu for choice, menu in zip(chosen, menus, strict=True))
    assert nbytes(chosen) <= budget
    optimum = min(variance(choices) for choices in everything if nbytes(choices) <= budget)
    assert variance(chosen) <= (optimum + largest_step(menus, "nbytes", "variance")) * (1 + 1e-9)


@given(MENUS, FRACTIONS)
def test_within_the_variance_and_one_step_of_the_fewest_bytes(menus: list[list[Choice]], fraction: float) -> None:
    everything = list(product(*menus))
    least, most = (f(map(variance, everything)) for f in (min, max))
    bound = max(least, least ** (1 - fraction) * most**fraction)
    chosen = fewest_bytes(menus, bound)
    assert all(choice in menu for choice, menu in zip(chosen, menus, strict=True))
    assert variance(chosen) <= bound * (1 + 1e-11)
    optimum = min(nbytes(choices) for choices in everything if variance(choices) <= bound)
    assert nbytes(chosen) <= optimum + largest_step(menus, "variance", "nbytes")


@given(MENUS, FRACTIONS)
def test_each_is_at_least_as_good_as_the_other(menus: list[list[Choice]], fraction: float) -> None:
    cheapest, dearest = allocate_bits(menus, 0), fewest_bytes(menus, 0)
    by_bytes = allocate_bits(menus, nbytes(cheapest) + fraction * (nbytes(dearest) - nbytes(cheapest)))
    assert nbytes(fewest_bytes(menus, variance(by_bytes))) <= nbytes(by_bytes)
    low, high = variance(dearest), variance(cheapest)
    by_variance = fewest_bytes(menus, max(low, low ** (1 - fraction) * high**fraction))
    assert variance(allocate_bits(menus, nbytes(by_variance))) <= variance(by_variance) * (1 + 1e-9)


@given(MENUS, FRACTIONS, FRACTIONS)
def test_a_higher_limit_is_never_worse(menus: list[list[Choice]], one: float, other: float) -> None:
    low, high = sorted((one, other))
    most = sum(max(choice.nbytes for choice in menu) for menu in menus)
    assert variance(allocate_bits(menus, high * most)) <= variance(allocate_bits(menus, low * most)) * (1 + 1e-9)
    worst = sum(max(choice.variance for choice in menu) for menu in menus)
    assert nbytes(fewest_bytes(menus, high * worst)) <= nbytes(fewest_bytes(menus, low * worst))


def network(seed: int, tensors: int = 200, choices: int = 12) -> list[list[Choice]]:
    """Menus as tensors have them: variance falls as the square of the step, and depends on the rounding and group."""
    rng = random.Random(seed)
    menus = []
    for _ in range(tensors):
        numel, sensitivity = 256 * rng.randint(1, 4000), 10 ** rng.uniform(-1.5, 1.5)
        menus.append([option(4 * numel, 0.0)])
        for _ in range(choices - 1):
            bits, group, noise = rng.randint(1, 8), rng.choice([32, 64, 256, 1024]), rng.uniform(0.5, 2)
            spread = noise * math.log(group) / (2**bits - 1) ** 2
            menus[-1].append(option(numel * bits // 8 + 4 * numel // group, numel * sensitivity * spread))
    return menus


def relaxation(menus: Sequence[Menu], cost: str, loss: str, limit: float, scale: float) -> tuple[float, float]:
    """The least loss if choices could be mixed, and the loss between the two choices of the one menu that it mixes."""
    optimize, sparse = pytest.importorskip("scipy.optimize"), pytest.importorskip("scipy.sparse")
    flat = [(index, getattr(c, cost), getattr(c, loss)) for index, menu in enumerate(menus) for c in menu]
    index, costs, losses = zip(*flat, strict=True)
    columns = range(len(flat))
    solution = optimize.linprog(
        [value / scale for value in losses],
        A_ub=sparse.csr_matrix(([value / limit for value in costs], ([0] * len(flat), columns))),
        b_ub=[1.0],
        A_eq=sparse.csr_matrix(([1.0] * len(flat), (index, columns))),
        b_eq=[1.0] * len(menus),
        method="highs-ds",  # A basic solution: not more than one menu is mixed.
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert solution.success
    mixed = [losses[column] for column in columns if 1e-7 < solution.x[column] < 1 - 1e-7]
    return solution.fun * scale, max(mixed, default=0.0) - min(mixed, default=0.0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_within_the_mixed_step_of_the_linear_relaxation(seed: int, bits: float) -> None:
    menus = network(seed)
    budget = bits / 32 * sum(menu[0].nbytes for menu in menus)
    chosen = allocate_bits(menus, budget)
    assert nbytes(chosen) <= budget
    bound, step = relaxation(menus, "nbytes", "variance", budget, variance(chosen))
    assert step <= largest_step(menus, "nbytes", "variance") * (1 + 1e-6)
    assert bound * (1 - 1e-6) <= variance(chosen) <= bound + step + 1e-6 * bound
    # In practice far less than a step.
    assert variance(chosen) <= 1.01 * bound

    # As if it had been summed in another order.
    most = variance(chosen) * (1 - 1e-13)
    cheapest = fewest_bytes(menus, most)
    assert nbytes(cheapest) <= nbytes(chosen)
    assert variance(cheapest) <= most * (1 + 1e-11)
    bound, step = relaxation(menus, "variance", "nbytes", most, nbytes(chosen))
    assert step <= largest_step(menus, "variance", "nbytes") * (1 + 1e-6)
    assert bound * (1 - 1e-6) <= nbytes(cheapest) <= bound + step + 1e-6 * bound
    assert nbytes(cheapest) <= 1.001 * bound


def greedy(menus: Sequence[Menu], cost: str, loss: str, limit: float) -> list[Choice]:
    """From the cheapest of every menu, always the choice that gains most for its cost, until none fits."""
    chosen = [min(menu, key=lambda c: (getattr(c, cost), getattr(c, loss))) for menu in menus]
    while True:
        left = limit - sum(getattr(choice, cost) for choice in chosen)
        steps = []
        for index, menu in enumerate(menus):
            for choice in menu:
                more = getattr(choice, cost) - getattr(chosen[index], cost)
                gain = getattr(chosen[index], loss) - getattr(choice, loss)
                if 0 < more <= left and gain > 0:
                    steps.append((gain / more, index, choice))
        if not steps:
            return chosen
        _, index, chosen[index] = max(steps, key=lambda step: step[0])


@pytest.mark.parametrize("seed", range(40))
def test_never_worse_than_greedy_until_nothing_fits(seed: int) -> None:
    menus = network(seed, tensors=12, choices=6)
    budget = random.Random(seed).uniform(0.15, 0.4) * sum(menu[0].nbytes for menu in menus)
    chosen, plain = allocate_bits(menus, budget), greedy(menus, "nbytes", "variance", budget)
    assert variance(chosen) <= variance(plain) * (1 + 1e-9)
    assert nbytes(fewest_bytes(menus, variance(chosen))) <= nbytes(chosen)
    bound = variance(plain) * random.Random(seed).uniform(1, 2)
    chosen, plain = fewest_bytes(menus, bound), greedy(menus, "variance", "nbytes", bound)
    assert nbytes(chosen) <= nbytes(plain)
    assert variance(allocate_bits(menus, nbytes(chosen))) <= variance(chosen) * (1 + 1e-9)


def test_a_step_that_does_not_fit_gives_way_to_one_off_the_hull() -> None:
    small, middle, large = option(10, 100.0), option(14, 90.0), option(20, 0.0)
    assert allocate_bits([[small, middle, large]], 19) == [middle]
    assert fewest_bytes([[small, middle, large]], 99) == [middle]


def test_a_small_step_does_not_keep_out_a_large_one() -> None:
    # The small one gains more for a byte; after it the large one has no room.
    large, small = [option(0, 1000.0), option(100, 0.0)], [option(0, 11.0), option(1, 0.0)]
    assert allocate_bits([large, small], 100) == [large[1], small[0]]
    assert fewest_bytes([large, small], 11) == [large[1], small[0]]


def test_choices_that_another_beats_are_not_taken() -> None:
    best, dearer, noisier = option(10, 1.0), option(11, 1.0), option(10, 2.0)
    for menu in ([best, dearer, noisier], [noisier, dearer, best]):
        assert allocate_bits([menu], 100) == fewest_bytes([menu], 2) == [best]


@pytest.mark.parametrize("limit", [-1.0, 0.0, 2.5, math.inf])
def test_limits_out_of_reach(limit: float) -> None:
    menus = [[option(3, 4.0), option(6, 2.0), option(9, 1.0)], [option(5, 1e30)], [option(4, 1e-9), option(7, 0.0)]]
    cheapest, best = [menu[0] for menu in menus], [menu[-1] for menu in menus]
    assert allocate_bits(menus, limit) == (best if limit == math.inf else cheapest)
    assert fewest_bytes(menus, limit) == (cheapest if limit == math.inf else best)
    assert allocate_bits([], limit) == fewest_bytes([], limit) == []


def test_small_variances_count_beside_large_ones() -> None:
    menus = [[option(1, 1e15), option(2, 1e14)], *[[option(1, 2 * 10.0**-k), option(2, 10.0**-k)] for k in range(16)]]
    for budget, dearer in pairwise(range(17, 35)):
        chosen = allocate_bits(menus, budget)
        assert [choice.nbytes for choice in chosen] == [2] * (budget - 17) + [1] * (34 - budget)
        assert nbytes(allocate_bits(menus, dearer)) == dearer


@pytest.mark.parametrize("solve", [allocate_bits, fewest_bytes])
def test_bad_input(solve: Callable[[Sequence[Menu], float], list[Choice]]) -> None:
    good = [option(1, 1.0)]
    with pytest.raises(ValueError, match=f"gact_fx.{solve.__name__}: every menu needs a choice, got none in menu 1;"):
        solve([good, []], 10)
    for value in (-1.0, math.nan, math.inf, -math.inf):
        for bad in (option(1, value), Choice(Code(4, "dither", 64), value, 1.0)):  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=f"gact_fx.{solve.__name__}: nbytes and variance must be .*, got .*1;"):
                solve([good, [*good, bad]], 10)
    with pytest.raises(ValueError, match="must be a number, got nan; pass"):
        solve([good], math.nan)
