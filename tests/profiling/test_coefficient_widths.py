"""What codes add by way of coefficients is known at every width, and is nowhere nothing by chance."""

import pytest

from gact_fx.codec.code import WIDTHS, Code
from gact_fx.profiling.coefficient_meter import at_coefficients
from gact_fx.profiling.measure_chain import MEASURED, Added, measure_widths
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
