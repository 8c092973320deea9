"""What codes add by way of coefficients is known at every width, and is nowhere nothing by chance."""

import math

import pytest

from gact_fx.codec.code import WIDTHS, Code
from gact_fx.profiling.added_by_width import MEASURED, Added, all_widths, measure_widths
from gact_fx.profiling.coefficient_meter import at_coefficients
from gact_fx.records import Sensitivity

ROUNDINGS = ("stochastic", "dither")


def _jumps(bits: int) -> Added:
    """An element that 5 bits bring over a jump, and 6 bits do not."""
    first = 4.0**-bits
    return Added(1000.0 if bits <= 5 else first, 0.0, 0.0, first)


def test_a_jump_between_two_widths_is_measured_at_all_widths_between() -> None:
    found = measure_widths(_jumps, MEASURED)
    assert list(found) == [2, 4, 5, 6, 7, 8]
    assert found[5].variance == 1000.0


@pytest.mark.parametrize("high", [4.0, 0.0])
def test_what_falls_as_first_order_says_is_not_measured_again(high: float) -> None:
    def smooth(bits: int) -> Added:
        return Added(high * 4.0**-bits, 0.0, 0.0, 4.0**-bits)

    assert tuple(measure_widths(smooth, MEASURED)) == MEASURED


def test_elements_that_are_codes_by_chance_are_not_free() -> None:
    codes = [Code(bits, rounding, 256) for rounding in ROUNDINGS for bits in WIDTHS]
    added = {c: Added(0.0, 0.0, 0.0, 0.0) if c.rounding == "stochastic" else Added(6.0, 1.0, 2.0, 6.0) for c in codes}
    found = at_coefficients(Sensitivity(1.0, dict.fromkeys(codes, 1.0)), added, 1.0)
    for bits in WIDTHS:
        stochastic, dithered = (Code(bits, rounding, 256) for rounding in ROUNDINGS)
        assert found.variance(stochastic) == found.variance(dithered)
        assert found.variances[dithered] > 0
        assert found.squared_bias(stochastic) == found.squared_bias(dithered) > 0
    assert found.value > 0


def test_a_bias_that_is_no_longer_seen_to_add_up_is_less_at_widths_between_too() -> None:
    measured = {4: Added(4000.0, 300.0, 1000.0, 4000.0), 8: Added(20.0, 1.0, 0.0, 20.0)}
    found = all_widths(measured, "stochastic")
    biases = [found[Code(bits, "stochastic", 256)] for bits in range(4, 9)]
    whole = [bias.own_bias + bias.coherent_bias for bias in biases]
    assert whole == pytest.approx([1300.0 * (1 / 1300) ** (step / 4) for step in range(5)])
    assert all(bias.own_bias >= 0 and bias.coherent_bias >= 0 for bias in biases)


@pytest.mark.parametrize("weight", [1.0, 0.25, 4.0])
def test_what_is_infinite_on_few_rows_is_infinite_on_all(weight: float) -> None:
    """Nothing times infinity is no number, which the planner would take for something that was not measured."""
    code = Code(7, "dither", 256)
    never = Sensitivity(1.0, {code: math.inf}, {}, {code: math.inf}, coherent_biases={code: math.inf})
    of = Sensitivity(1.0, {code: math.inf}, {}, {code: math.inf}, {"bare": never}, coherent_biases={code: math.inf})
    found = of.of_whole_batch(weight)
    for each in (found, found.others["bare"]):
        assert each.variances[code] == each.squared_biases[code] == math.inf
