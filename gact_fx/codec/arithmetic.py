"""The arithmetic of the codec in PyTorch, on groups of elements: what ``csrc/codec.h`` states in C++, bit by bit.

Everything here is a function without branches on data or loops over it, so that a compiler can fuse it. 32-bit words
are held in int32, whose products wrap around.
"""

import math

import torch
from torch import Tensor

from gact_fx.codec.code import Code

FRACTION = 22  # bits below one step with which elements are rounded: 8 + 22 fit an int32
_MIN_STEP = 2.0**-100  # keeps 1/step far from overflow
_IRREGULAR = 0x8000  # sign bit of a stored step
_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
# Elements i, i + 16, i + 32 and i + 48 of every 64 share a hash, of which four products are taken.
_MULTIPLIERS = [0x846CA68B * 747796405**share % 2**32 for share in range(4)]
# Magnitudes from which a group is irregular: below them neither ranges nor decoded values overflow.
_LIMITS = {torch.float64: 2.0**125, torch.float32: 2.0**125, torch.bfloat16: 2.0**125, torch.float16: 2.0**14}


# ---- Words and noise ---------------------------------------------------------------------------------------------


def _signed(word: int) -> int:
    """Return the low 32 bits as the int32 that has them."""
    return (word + 2**31) % 2**32 - 2**31


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Shift in zeros, where int32's own shift repeats the sign."""
    return x >> count & (1 << 32 - count) - 1


def _mix(x: Tensor) -> Tensor:
    """Hash int32 words (lowbias32, C. Wellons 2018), from the start to before its last product."""
    x = (x ^ _shift_right(x, 16)) * 0x7FEB352D
    return x ^ _shift_right(x, 15)


def _chain(key: Tensor, word: Tensor | int) -> Tensor:
    x = _mix(key ^ word) * _signed(_MULTIPLIERS[0])
    return x ^ _shift_right(x, 16)


def _seed_key(seed: int) -> int:
    """Hash a seed of 64 bits, in plain integers."""
    key = 0
    for word in (seed & _WORD, seed >> 32 & _WORD):
        key ^= word
        key = (key ^ key >> 16) * 0x7FEB352D & _WORD
        key = (key ^ key >> 15) * _MULTIPLIERS[0] & _WORD
        key ^= key >> 16
    return key


def bits_of(x: Tensor) -> Tensor:
    """Return the bits of floats: int64 for float64, otherwise int32, zeros in front of 16 bits."""
    if x.dtype == torch.float64:
        return x.view(torch.int64)
    return x.view(torch.int32) if x.dtype == torch.float32 else x.view(torch.int16).to(torch.int32) & 0xFFFF


def floats_of(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Invert `bits_of`."""
    return (bits.to(torch.int16) if dtype.itemsize == 2 else bits).view(dtype)


def noise_key(seed: int, groups: Tensor, minimum: Tensor, step: Tensor) -> Tensor:
    """Return the groups' keys (int32) from their indices (int64) and the bits of their metadata."""
    key = _chain(groups.to(torch.int32), _signed(_seed_key(seed)))
    key = _chain(key, (groups >> 32).to(torch.int32))
    key = _chain(key, minimum.to(torch.int32))
    if minimum.dtype == torch.int64:
        key = _chain(key, (minimum >> 32).to(torch.int32))
    return _chain(key, step)


def element_noise(key: Tensor, size: int, rounding: str) -> Tensor:
    """Return noise of FRACTION bits, int32 (groups, size); to nearest, half a step."""
    if rounding == "nearest":
        return torch.full((key.shape[0], size), 1 << FRACTION - 1, dtype=torch.int32, device=key.device)
    element = torch.arange(size, device=key.device, dtype=torch.int32)
    words = _mix(key[:, None] + ((element >> 6 << 4) + (element & 15)) * _signed(_GOLDEN))
    share = element >> 4 & 3
    multiplier = torch.where((share & 1) == 1, _signed(_MULTIPLIERS[1]), _signed(_MULTIPLIERS[0]))
    third = torch.where((share & 1) == 1, _signed(_MULTIPLIERS[3]), _signed(_MULTIPLIERS[2]))
    multiplier = torch.where((share & 2) == 2, third, multiplier).to(torch.int32)
    return _shift_right(words * multiplier, 32 - FRACTION)


def limit_of(dtype: torch.dtype) -> float:
    """The magnitude from which a group is irregular."""
    return _LIMITS[dtype]


# ---- Groups ------------------------------------------------------------------------------------------------------


def quantize(x: Tensor, code: Code, groups: Tensor, irregular: Tensor | bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups of elements, stochastically and for dither to the same codes.

    Args:
        x: (groups, group_size), float32, float64, bfloat16 or float16.
        code: of 1 to 8 bits.
        groups: the groups' indices, int64.
        irregular: groups that are to be coded as irregular ones beside those that have to be.

    Returns:
        Codes, int32 (groups, group_size); the minima's bits as `bits_of` gives them; the steps' 16 bits, int32.
    """
    values = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    finite = values.isfinite()
    low = torch.where(finite, values, math.inf).amin(dim=1)
    high = torch.where(finite, values, -math.inf).amax(dim=1)
    none = low > high
    low = torch.where(none | (low == 0), 0.0, low)  # -0.0 becomes +0.0
    high = torch.where(none, 0.0, high)
    kinds = _kinds(x, code.bits)
    limit = limit_of(x.dtype)
    irregular = irregular | (values.isnan() | values.isinf()).any(dim=1) | (low <= -limit) | (high >= limit)
    levels = _levels(irregular, kinds, code.bits)
    quarter = torch.where(irregular, 0.25, 1.0).to(values.dtype)
    step_bits = _encode_step(high * quarter - low * quarter, levels, irregular, kinds)
    step = _decode_step(step_bits, values.dtype)
    inverse = torch.where(step == 0, 0.0, torch.full_like(step, 2.0**FRACTION) / step)
    minimum_bits = bits_of(low.to(x.dtype))

    noise = element_noise(noise_key(code.seed, groups, minimum_bits, step_bits), x.shape[1], code.rounding)
    offset = torch.where(finite, values, low[:, None]) * quarter[:, None] - (low * quarter)[:, None]
    fixed = (offset * inverse[:, None]).round().to(torch.int32)
    codes = (fixed + noise >> FRACTION).minimum(levels[:, None])
    nan, positive, negative = (position[:, None] for position in _positions(kinds))
    position = torch.where(values == math.inf, positive, torch.where(values == -math.inf, negative, nan))
    return torch.where(finite, codes, levels[:, None] + 1 + position), minimum_bits, step_bits


def dequantize(
    codes: Tensor, minimum_bits: Tensor, step_bits: Tensor, dtype: torch.dtype, code: Code, groups: Tensor
) -> Tensor:
    """Return the values (groups, group_size) of codes; arguments as `quantize` takes and returns them."""
    real = torch.float64 if dtype == torch.float64 else torch.float32
    irregular, kinds = step_bits >= _IRREGULAR, step_bits & 7
    levels = _levels(irregular, kinds, code.bits)
    quarter = torch.where(irregular, 0.25, 1.0).to(real)
    minimum = floats_of(minimum_bits, dtype).to(real) * quarter
    step = _decode_step(step_bits, real)
    steps = codes
    if code.rounding == "dither":
        noise = element_noise(noise_key(code.seed, groups, minimum_bits, step_bits), codes.shape[1], code.rounding)
        steps = (codes << FRACTION) + ((1 << FRACTION - 1) - noise)
        step = step * 2.0**-FRACTION
    values = (minimum[:, None] + steps.to(real) * step[:, None]) * (1.0 / quarter)[:, None]
    largest = torch.finfo(dtype).max
    values = values.clamp(-largest, largest).to(dtype)
    return _restore_nonfinite(values, codes - levels[:, None] - 1, irregular, kinds)


def _encode_step(range_: Tensor, levels: Tensor, irregular: Tensor, kinds: Tensor) -> Tensor:
    """Return the steps' 16 bits: rounded up to 8 bits of mantissa, in irregular groups to what 12 bits hold."""

    def rounded_up(word: Tensor, count: int) -> Tensor:
        return word + ((1 << count) - 1) >> count

    is_double = range_.dtype == torch.float64
    word = bits_of((range_ / levels.clamp(min=1).to(range_.dtype)).clamp(min=_MIN_STEP))
    regular = rounded_up(word, 45 if is_double else 16) - (1023 - 127 << 7 if is_double else 0)
    dropped = rounded_up(word, _dropped(range_.dtype))
    flat = (range_ == 0) | (levels == 0)
    quarters = _IRREGULAR | torch.where(flat, 0, dropped) << 3 | kinds
    return torch.where(irregular, quarters, torch.where(flat, 0, regular)).to(torch.int32)


def _dropped(real: torch.dtype) -> int:
    """Mantissa bits of an irregular group's step that are not stored: 4 are, beside float64's exponent 1."""
    return 51 if real == torch.float64 else 19


def _decode_step(step_bits: Tensor, real: torch.dtype) -> Tensor:
    irregular = step_bits >= _IRREGULAR
    regular = (torch.where(irregular, 0, step_bits) << 16).view(torch.float32).to(real)
    word = (step_bits >> 3 & 0xFFF).to(torch.int64 if real == torch.float64 else torch.int32)
    return torch.where(irregular, (word << _dropped(real)).view(real), regular)


# ---- Non-finite elements, see csrc/codec.h -----------------------------------------------------------------------


def _kinds(x: Tensor, bits: int) -> Tensor:
    """Return the groups' sets of non-finite kinds that the codes tell apart: bit 0 NaN, 1 +Inf, 2 -Inf."""
    nan, positive, negative = (kind.any(dim=1).to(torch.int32) for kind in (x.isnan(), x == math.inf, x == -math.inf))
    kinds = nan | positive << 1 | negative << 2
    return torch.where(_count(kinds) < 1 << bits, kinds, 1)


def _count(kinds: Tensor) -> Tensor:
    return (kinds & 1) + (kinds >> 1 & 1) + (kinds >> 2 & 1)


def _levels(irregular: Tensor, kinds: Tensor, bits: int) -> Tensor:
    """Return the largest code of a finite value."""
    return (1 << bits) - 1 - torch.where(irregular, _count(kinds), 0)


def _positions(kinds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where NaN, +Inf and -Inf stand among the kinds; one that is not in the set was merged into NaN."""
    positive = torch.where((kinds >> 1 & 1) == 1, kinds & 1, 0)
    negative = torch.where((kinds >> 2 & 1) == 1, (kinds & 1) + (kinds >> 1 & 1), 0)
    return torch.zeros_like(kinds), positive, negative


def _restore_nonfinite(values: Tensor, beyond: Tensor, irregular: Tensor, kinds: Tensor) -> Tensor:
    """Put the non-finite kinds where the codes go beyond the finite levels."""
    for bit, (kind, position) in enumerate(zip((math.nan, math.inf, -math.inf), _positions(kinds), strict=True)):
        present = irregular & ((kinds >> bit & 1) == 1)
        values = values.masked_fill((beyond == position[:, None]) & present[:, None], kind)
    return values


# ---- 16 bits: float32 as bfloat16 --------------------------------------------------------------------------------


def round_to_bfloat16(x: Tensor, code: Code, groups: Tensor) -> Tensor:
    """Return float32 (groups, group_size) as bfloat16's 16 bits, int32; the noise depends on the upper halves."""
    word = x.view(torch.int32)
    upper, magnitude = _shift_right(word, 16), word & 0x7FFFFFFF
    if code.rounding == "nearest":
        noise = 0x7FFF + (upper & 1)
    else:
        zero = torch.zeros_like(groups, dtype=torch.int32)
        key = noise_key(code.seed, groups, zero, zero)
        element = torch.arange(x.shape[1], device=x.device, dtype=torch.int32) * _signed(_GOLDEN)
        noise = _shift_right(_mix(key[:, None] + element ^ upper) * _signed(_MULTIPLIERS[0]), 16)
    rounded = _shift_right(word + noise, 16)
    rounded = torch.where((rounded & 0x7FFF) < 0x7F80, rounded, rounded - 1)  # the largest, not infinity
    nonfinite = torch.where(magnitude > 0x7F800000, upper | 0x40, upper)
    return torch.where(magnitude < 0x7F800000, rounded, nonfinite)
