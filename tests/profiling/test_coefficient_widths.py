"""What codes add by way of coefficients is known at every width, and is nowhere nothing by chance."""

import math

import pytest

from gact_fx.codec.code import WIDTHS, Code, step_variance
from gact_fx.profiling.added_by_width import MEASURED, NOT_FINITE, Added, all_widths, measure_widths
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


def test_rotated_codes_add_what_dither_of_their_variance_does() -> None:
    """Backward bends twice as much as first order says at every width."""
    dithered = {bits: Code(bits, "dither", 256) for bits in WIDTHS}
    first = {dithered[bits]: step_variance(bits) for bits in WIDTHS} | {
        Code(b, "stochastic", 256): step_variance(b) for b in (4, 8)
    }
    # As much as 3 bits of dither, half as much as 2 and more than 1.
    turned = {2: step_variance(3), 3: step_variance(2) / 2, 1: 2.0}
    variances = first | {Code(bits, "rotated", 256): variance for bits, variance in turned.items()}
    added = {code: Added(2 * variance, variance, 0.0, variance) for code, variance in first.items()}
    found = at_coefficients(Sensitivity(1.0, variances), added, 1.0, is_tame=True)
    for bits, variance in turned.items():
        assert found.variances[Code(bits, "rotated", 256)] == pytest.approx(3 * variance, rel=0.01)
        assert found.squared_bias(Code(bits, "rotated", 256)) == pytest.approx(variance, rel=0.01)


def test_errors_without_bound_are_not_let_near_a_pole() -> None:
    codes = [Code(bits, rounding, 256) for rounding in ("dither", "rotated") for bits in WIDTHS[:4]]
    codes += [Code(bits, rounding, 256) for rounding in ROUNDINGS for bits in WIDTHS]
    variances = {code: step_variance(code.bits) * (0.5 if code.rounding == "rotated" else 1) for code in codes}
    added = {code: Added(v, 0.0, 0.0, v) for code, v in variances.items() if code.rounding != "rotated"}
    found = at_coefficients(Sensitivity(1.0, variances), added, 1.0)
    assert found.variances[Code(1, "rotated", 256)] == math.inf
    assert found.variances[Code(2, "rotated", 256)] < math.inf
    added[Code(1, "dither", 256)] = NOT_FINITE
    found = at_coefficients(Sensitivity(1.0, variances), added, 1.0)
    assert all(found.variances[Code(bits, "rotated", 256)] == math.inf for bits in (1, 2, 3, 4))
    assert found.variances[Code(4, "dither", 256)] < math.inf


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
