"""Patterns of widths: the best there are, few runs, and judged by other rows than those that they were chosen on."""

import itertools
import math
import random

import pytest

from gact_fx.codec.by_place import count_places, mean_bits, runs_of
from gact_fx.codec.code import step_variance
from gact_fx.patterns import FLOOR, MOST_BLOCKS, MOST_PIECES, Pattern, Places, list_patterns, shares_by_width


def rows_of(*weights: float, rows: int = 4) -> Places:
    return Places(len(weights), tuple(tuple(weights) for _ in range(rows)))


def drawn(places: int, sigma: float, rows: int = 2, first: float = 1.0) -> Places:
    """Weights of which the first four are ``first`` times as large."""
    draw = random.Random(places).lognormvariate
    weights = (tuple(draw(0, sigma) * (first if p < 4 else 1) for p in range(places)) for _ in range(rows))
    return Places(places, tuple(weights))


def judged(pattern: Pattern) -> float:
    """What it adds, relative to one code with S(b) = 1."""
    return sum(share * step_variance(bits) for bits, share in pattern.shares.items())


def digits(by_place: str) -> str:
    return "".join(str(run.bits) * run.count for run in runs_of(by_place))


def added(widths: str, weights: tuple[float, ...]) -> float:
    return sum(w * step_variance(int(d)) for d, w in zip(widths, weights, strict=True)) / sum(weights)


def test_no_pattern_of_as_many_bits_adds_less() -> None:
    weights = (100.0, 30.0, 2.0, 1.0)
    patterns = list_patterns(rows_of(*weights))
    assert len(patterns) > 5
    for pattern in patterns:
        widths = digits(pattern.by_place)
        assert judged(pattern) == pytest.approx(added(widths, weights))
        every = ("".join(each) for each in itertools.product("12345678", repeat=4))
        best = min(added(p, weights) for p in every if sum(map(int, p)) <= sum(map(int, widths)))
        assert added(widths, weights) == pytest.approx(best)


def test_patterns_go_from_few_bits_to_many() -> None:
    found = [mean_bits(pattern.by_place) for pattern in list_patterns(rows_of(50.0, *[1.0] * 20))]
    assert found == sorted(found)
    assert found[0] < 2
    assert found[-1] > 6


def test_an_accident_of_some_rows_is_worth_nothing() -> None:
    for pattern in list_patterns(drawn(48, 2.0)):
        # One width of as many bits would add no more.
        assert judged(pattern) > 0.9 * step_variance(mean_bits(pattern.by_place))
    lasting = list_patterns(drawn(48, 0.5, first=100))
    assert max(step_variance(mean_bits(p.by_place)) / judged(p) for p in lasting) > 4


def test_runs_are_few() -> None:
    for count in (33, 500):
        for pattern in list_patterns(drawn(count, 2.0, rows=3)):
            assert count_places(pattern.by_place) == count
            assert len(list(runs_of(pattern.by_place))) <= MOST_PIECES


def test_of_many_places_neighbours_count_as_one() -> None:
    assert Places(MOST_BLOCKS, ()).block_size == 1
    blocks = -(-3000 // 6)
    places = Places(3000, tuple((100.0, *[1.0] * (blocks - 1)) for _ in range(2)))
    assert places.block_size == 6
    patterns = list_patterns(places)
    assert patterns
    for pattern in patterns:
        assert count_places(pattern.by_place) == 3000
        assert [run.count for run in runs_of(pattern.by_place)] == [6, 2994]
    other = "8x3 4x2997"
    shares = shares_by_width(places, other)
    assert shares == pytest.approx({8: 50 / 599, 4: 549 / 599})


def test_the_first_place_of_many_has_a_run_of_its_own() -> None:
    patterns = list_patterns(rows_of(1000.0, *[1.0] * 300))
    assert any(pattern.by_place in ("8 4x300", "8 3x300") for pattern in patterns)


def test_least_widths_are_kept_to() -> None:
    assert all(min(digits(pattern.by_place)) >= "6" for pattern in list_patterns(rows_of(1000.0, 1.0, 1e-9), 6))


def test_what_counts_for_nothing_now_is_not_given_up() -> None:
    """It has no fewer bits than what counts for `FLOOR` of the mean."""
    dead, alive = list_patterns(rows_of(1.0, 0.0)), list_patterns(rows_of(1.0, FLOOR / 2))
    assert [p.by_place for p in dead] == [p.by_place for p in alive]


NOTHING = [
    rows_of(1.0, 2.0, rows=1),
    rows_of(1.0),
    rows_of(0.0, 0.0),
    rows_of(1.0, 1.0),
    Places(2, ((1.0, 2.0), (0.0, 0.0))),
    Places(2, ((1.0, math.inf), (1.0, 1.0))),
    Places(2, ((1.0, math.nan), (1.0, 1.0))),
]


@pytest.mark.parametrize("weights", NOTHING)
def test_no_patterns_where_nothing_tells_them(weights: Places) -> None:
    assert not list_patterns(weights)


def test_shares_are_judged_on_the_rows_that_a_pattern_was_chosen_on_and_plain_on_others() -> None:
    mine, others = drawn(24, 1.0), Places(24, tuple(row[:24] for row in drawn(48, 1.0).rows))
    pattern = list_patterns(mine)[6]
    assert shares_by_width(mine, pattern.by_place) == pattern.shares
    found = shares_by_width(others, pattern.by_place)
    assert found is not None and found != pattern.shares
    assert sum(found.values()) == pytest.approx(1)
    assert shares_by_width(others, pattern.by_place + " 4") is None
