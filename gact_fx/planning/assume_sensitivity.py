"""What is assumed of tensors that nobody has measured: on average they are as sensitive, element by element."""

import math
from dataclasses import replace

from gact_fx.codec.code import WIDTHS, Code, relative_variance
from gact_fx.codec.layout import BFLOAT16_BITS, ROTATED_BITS, ROUNDINGS
from gact_fx.config import GROUP_SIZES
from gact_fx.passes.encodings import Quantize
from gact_fx.records import SavedTensor, Sensitivity

_CODES = tuple(
    Code(bits, rounding, size)
    for bits in (*WIDTHS, BFLOAT16_BITS)
    for rounding in ROUNDINGS
    if rounding != "nearest" and bits <= {"dither": WIDTHS[-1], "rotated": ROTATED_BITS}.get(rounding, BFLOAT16_BITS)
    for size in GROUP_SIZES
)


def _squared_range(group_size: int) -> float:
    """Of so many normal numbers, in units of that of 256; within 3 % from 32 to 1024."""
    return float((math.log2(group_size) / 8) ** 1.5)


def assume_sensitivity(tensor: SavedTensor, how: Quantize) -> Sensitivity:
    """The sensitivity of a tensor that is as sensitive per element as all others, stored as its values where these may
    be.

    Where backward bends in it, these codes are taken for as good as measured ones.
    """
    value = float(tensor.numel)
    variances = {code: value * relative_variance(code) * _squared_range(code.group_size) for code in _CODES}
    found = Sensitivity(value, variances, squared_biases=dict.fromkeys(_CODES, 0.0) if how.bends else {})
    others = () if how.values_allowed else how.other_ways()
    return replace(found, others=dict.fromkeys(others, found))
