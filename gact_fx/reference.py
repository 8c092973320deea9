"""The operators in PyTorch alone: the oracle for the kernels, and what runs on devices that have none.

It states the arithmetic of ``csrc/codec.h`` with tensors, in the same order of operations, and gives the same bytes
and values bit by bit. Work goes in chunks so that the temporaries stay small; 64-bit integers hold the 32-bit hashes.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from gact_fx.codec_layout import (
    MASK_BLOCK,
    MASK_DTYPES,
    blob_nbytes,
    check_compress,
    check_decompress,
    group_count,
    mask_nbytes,
)

__all__ = ["compress", "decompress", "pack_mask", "unpack_mask"]

_CHUNK = 1 << 20  # elements; a temporary of 64-bit integers then takes 8 MiB
_MIN_STEP = 2.0**-100  # keeps 1/step far from overflow
_IRREGULAR = 0x8000  # sign bit of a stored step
# Magnitudes from which a group is irregular: below them neither ranges nor decoded values overflow.
_LIMIT = {torch.float32: 2.0**125, torch.bfloat16: 2.0**125, torch.float16: 2.0**14}
_MASK32 = 0xFFFFFFFF


def compress(x: torch.Tensor, bits: int, group_size: int, seed: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Compress a tensor; `gact_fx.ops.compress` tells shapes, dtypes and errors."""
    check_compress(x, bits, group_size, mask)
    if x.dtype in MASK_DTYPES:
        return pack_mask(x)
    flat = x.reshape(-1)
    groups = group_count(flat.numel(), group_size)
    mask_numel = 0 if mask is None else mask.numel()
    blob = x.new_empty(blob_nbytes(flat.numel(), x.dtype, bits, group_size, mask_numel), dtype=torch.uint8)
    codes, minimum, step, rest = _sections(blob, x.dtype, groups, bits, group_size)
    for first, last in _chunks(groups, group_size):
        rows = _rows(flat[first * group_size : last * group_size], group_size)
        quantized, low, step_bits = _quantize(rows, bits, seed, first)
        pad = last * group_size - flat.numel()
        if pad > 0:
            quantized[-1, group_size - pad :] = 0
        codes[first:last] = _pack(quantized, bits)
        minimum[first:last] = low[:, None].view(torch.uint8)
        step[first:last] = step_bits.to(torch.int16)[:, None].view(torch.uint8)
    if mask is not None:
        rest.copy_(pack_mask(mask))
    return blob


def decompress(blob: torch.Tensor, size: Sequence[int], dtype: torch.dtype, bits: int, group_size: int) -> torch.Tensor:
    """Decompress a blob; `gact_fx.ops.decompress` tells shapes, dtypes and errors."""
    check_decompress(blob, size, dtype, bits, group_size)
    if any(extent < 0 for extent in size):
        raise ValueError(f"gact_fx.decompress: size must not be negative, got {list(size)}")
    numel = math.prod(size)
    nbytes = blob_nbytes(numel, dtype, bits, group_size)
    if blob.numel() < nbytes:
        raise ValueError(
            f"gact_fx.decompress: blob must have at least {nbytes} bytes for size {list(size)}, got {blob.numel()}"
        )
    if dtype in MASK_DTYPES:
        return unpack_mask(blob[blob.numel() - nbytes :], numel).view(size).to(dtype)
    groups = group_count(numel, group_size)
    codes, minimum, step, _ = _sections(blob, dtype, groups, bits, group_size)
    result = blob.new_empty(numel, dtype=dtype)
    for first, last in _chunks(groups, group_size):
        # Cloned because a view as a wider dtype needs alignment, which a slice of a blob need not have.
        low = minimum[first:last].clone().view(dtype)[:, 0]
        step_bits = step[first:last].clone().view(torch.int16)[:, 0].to(torch.int64) & 0xFFFF
        values = _dequantize(_unpack(codes[first:last], bits, group_size), low, step_bits, bits)
        result[first * group_size : last * group_size] = values.view(-1)[: numel - first * group_size]
    return result.view(size)


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """Pack a bool or uint8 tensor of any shape, 256 elements in 32 bytes; byte j holds elements j + 32k at bit k."""
    flat = mask.reshape(-1)
    packed = mask.new_empty(mask_nbytes(flat.numel()), dtype=torch.uint8)
    for first, last in _chunks(group_count(flat.numel(), MASK_BLOCK), MASK_BLOCK):
        chunk = flat[first * MASK_BLOCK : last * MASK_BLOCK]
        rows = torch.nn.functional.pad(chunk, (0, (last - first) * MASK_BLOCK - chunk.numel())).view(-1, MASK_BLOCK)
        packed[first * MASK_BLOCK // 8 : last * MASK_BLOCK // 8] = _pack(rows.ne(0).to(torch.uint8), 1).view(-1)
    return packed


def unpack_mask(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the first ``numel`` elements of a packed mask, as a 1-D bool tensor."""
    result = packed.new_empty(numel, dtype=torch.bool)
    rows = packed.view(-1, MASK_BLOCK // 8)
    for first, last in _chunks(rows.shape[0], MASK_BLOCK):
        values = _unpack(rows[first:last], 1, MASK_BLOCK).view(-1)
        result[first * MASK_BLOCK : last * MASK_BLOCK] = values[: numel - first * MASK_BLOCK] != 0
    return result


# ---- Layout -----------------------------------------------------------------------------------------------------


def _sections(
    blob: torch.Tensor, dtype: torch.dtype, groups: int, bits: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of the blob's codes, minimum and step, one row of bytes per group, and of what is behind them."""
    widths = (group_size * bits // 8, dtype.itemsize, 2)
    *parts, rest = torch.split(blob, [*(groups * width for width in widths), blob.numel() - groups * sum(widths)])
    codes, minimum, step = (part.view(groups, width) for part, width in zip(parts, widths, strict=True))
    return codes, minimum, step, rest


def _chunks(groups: int, group_size: int) -> Iterator[tuple[int, int]]:
    per_chunk = _CHUNK // group_size
    for first in range(0, groups, per_chunk):
        yield first, min(first + per_chunk, groups)


def _rows(flat: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return the elements as rows of a group each; an element of the last group pads it, so its extremes stay."""
    used = flat.numel() % group_size
    if used:
        flat = torch.cat([flat, flat[-used].expand(group_size - used)])
    return flat.view(-1, group_size)


def _planes(bits: int) -> Iterator[tuple[int, int]]:
    """Yield (width, offset) of the planes that a code is split into: 8 alone, or 4, 2 and 1, low bits first."""
    offset = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            yield width, offset
            offset += width


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 codes (groups, group_size) into bytes (groups, group_size * bits / 8).

    In a plane of ``width`` bits and ``stride`` bytes, byte j holds elements j, j + stride, ... from the low bits up.
    """
    planes = []
    for width, offset in _planes(bits):
        parts = (codes >> offset & (1 << width) - 1).view(codes.shape[0], 8 // width, codes.shape[1] * width // 8)
        plane = parts[:, 0].clone()
        for k in range(1, 8 // width):
            plane |= parts[:, k] << k * width
        planes.append(plane)
    return torch.cat(planes, dim=1)


def _unpack(packed: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Invert `_pack`."""
    widths = [width for width, _ in _planes(bits)]
    planes = torch.split(packed, [group_size * width // 8 for width in widths], dim=1)
    codes = packed.new_zeros(packed.shape[0], group_size)
    for (width, offset), plane in zip(_planes(bits), planes, strict=True):
        mask = (1 << width) - 1
        codes |= torch.cat([(plane >> k * width & mask) << offset for k in range(8 // width)], dim=1)
    return codes


# ---- Noise ------------------------------------------------------------------------------------------------------


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """Hash 32-bit words held in int64 (lowbias32, C. Wellons 2018); products wrap, of which the low 32 bits count."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def _noise(seed: int, groups: torch.Tensor, minimum: torch.Tensor, step_bits: torch.Tensor, size: int) -> torch.Tensor:
    """Return float32 noise in [0, 1) of shape (groups, size): a hash of seed, group, metadata and element."""
    if minimum.dtype == torch.float32:
        minimum_bits = minimum.view(torch.int32).to(torch.int64) & _MASK32
    else:
        minimum_bits = minimum.view(torch.int16).to(torch.int64) & 0xFFFF
    key = torch.zeros_like(groups)
    for word in (seed & _MASK32, seed >> 32 & _MASK32, groups & _MASK32, groups >> 32, minimum_bits, step_bits):
        key = _mix32(key ^ word)
    element = torch.arange(size, device=groups.device) * 0x9E3779B9
    hashed = _mix32((key[:, None] + element) & _MASK32)
    return (hashed >> 8).to(torch.float32) * 2.0**-24


# ---- Quantisation -----------------------------------------------------------------------------------------------


def _divide(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    """Divide as IEEE 754 has it: CUDA turns a division by a Python number into a product with its reciprocal."""
    return a / (b if isinstance(b, torch.Tensor) else torch.full_like(a, b))


def _quantize(x: torch.Tensor, bits: int, seed: int, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the codes (groups, group_size), the minima in the source's dtype and the steps' bits of groups of x."""
    values = x.to(torch.float32)
    irregular = ~(values.abs() < _LIMIT[x.dtype]).all(dim=1)  # NaN is less than nothing
    values = values.masked_fill(irregular[:, None], 0.0)
    low = values.amin(dim=1) + 0.0  # -0.0 becomes +0.0
    span = values.amax(dim=1) - low
    levels = (1 << bits) - 1
    rounded_up = _divide(span, float(levels)).clamp(min=_MIN_STEP).view(torch.int32).to(torch.int64) + 0xFFFF >> 16
    step_bits = torch.where(span == 0, 0, rounded_up)
    step = _bfloat16(step_bits)
    inverse = torch.where(step == 0, 0.0, _divide(torch.ones_like(step), step))

    which = irregular.nonzero()[:, 0]
    wide = x[which].to(torch.float64)
    wide_low, wide_step_bits, kinds = _irregular_metadata(wide, bits)
    low[which] = wide_low.to(torch.float32)
    step_bits[which] = wide_step_bits
    minimum = low.to(x.dtype)

    groups = torch.arange(first, first + x.shape[0], device=x.device)
    noise = _noise(seed, groups, minimum, step_bits, x.shape[1])
    codes = ((values - low[:, None]) * inverse[:, None] + noise).floor().clamp(max=levels).to(torch.uint8)
    codes[which] = _irregular_codes(wide, wide_low, wide_step_bits, kinds, bits, noise[which])
    return codes, minimum, step_bits


def _dequantize(codes: torch.Tensor, minimum: torch.Tensor, step_bits: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values (groups, group_size) in the minimum's dtype."""
    irregular = (step_bits & _IRREGULAR) != 0
    low, step = minimum.to(torch.float32), _bfloat16(torch.where(irregular, 0, step_bits))
    result = (low[:, None] + codes.to(torch.float32) * step[:, None]).to(minimum.dtype)
    which = irregular.nonzero()[:, 0]
    result[which] = _irregular_values(codes[which], minimum[which], step_bits[which], bits)
    return result


def _bfloat16(bits: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 bits, held in int64, as float32."""
    return (bits << 16).to(torch.int32).view(torch.float32)


# ---- Irregular groups: non-finite or huge elements, see csrc/codec.h --------------------------------------------


def _kind_positions(kinds: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the codes beyond the finite levels of NaN, +Inf and -Inf: how many kinds of lower bits the set has."""
    return torch.zeros_like(kinds), kinds & 1, (kinds & 1) + (kinds >> 1 & 1)


def _finite_levels(kinds: torch.Tensor, bits: int) -> torch.Tensor:
    return (1 << bits) - ((kinds & 1) + (kinds >> 1 & 1) + (kinds >> 2 & 1))


def _irregular_metadata(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the finite minima (float64), the steps' bits and the sets of non-finite kinds."""
    finite = x.isfinite()
    kinds = sum(
        (kind.any(dim=1).to(torch.int64) << bit for bit, kind in enumerate((x.isnan(), x == math.inf, x == -math.inf))),
        start=torch.zeros(x.shape[0], dtype=torch.int64, device=x.device),
    )
    kinds = torch.where(_finite_levels(kinds, bits) < 1, 1, kinds)
    some = finite.any(dim=1)
    low = torch.where(some, x.masked_fill(~finite, math.inf).amin(dim=1), 0.0) + 0.0
    high = torch.where(some, x.masked_fill(~finite, -math.inf).amax(dim=1), 0.0)
    span = high - low
    levels = _finite_levels(kinds, bits)
    # A quarter of the step is stored, for the range may be twice the largest float; up to 4 mantissa bits, so that
    # 3 more have room for the kinds.
    quarter = (span / (levels - 1).clamp(min=1).to(torch.float64) * 0.25).to(torch.float32).clamp(min=_MIN_STEP)
    rounded_up = quarter.view(torch.int32).to(torch.int64) + 0x7FFFF >> 19 << 3
    step_bits = torch.where((span == 0) | (levels == 1), 0, rounded_up)
    return low, step_bits | kinds | _IRREGULAR, kinds


def _irregular_step(step_bits: torch.Tensor) -> torch.Tensor:
    return _bfloat16(step_bits & 0x7FF8).to(torch.float64) * 4.0


def _irregular_codes(
    x: torch.Tensor, low: torch.Tensor, step_bits: torch.Tensor, kinds: torch.Tensor, bits: int, noise: torch.Tensor
) -> torch.Tensor:
    step, levels = _irregular_step(step_bits), _finite_levels(kinds, bits)
    inverse = torch.where(step == 0, 0.0, _divide(torch.ones_like(step), step))
    codes = ((x - low[:, None]) * inverse[:, None] + noise.to(torch.float64)).floor()
    codes = codes.minimum((levels - 1).to(torch.float64)[:, None])
    for bit, (kind, position) in enumerate(
        zip((x.isnan(), x == math.inf, x == -math.inf), _kind_positions(kinds), strict=True)
    ):
        # A kind that is not in the set was merged into NaN, which is then the first of the set.
        code = levels + torch.where((kinds >> bit & 1) == 1, position, 0)
        codes = torch.where(kind, code[:, None].to(torch.float64), codes)
    return codes.to(torch.uint8)


def _irregular_values(codes: torch.Tensor, minimum: torch.Tensor, step_bits: torch.Tensor, bits: int) -> torch.Tensor:
    kinds = step_bits & 7
    values = minimum.to(torch.float64)[:, None] + codes.to(torch.float64) * _irregular_step(step_bits)[:, None]
    values = values.clamp(max=torch.finfo(minimum.dtype).max)
    beyond = codes.to(torch.int64) - _finite_levels(kinds, bits)[:, None]
    result = values.to(torch.float32).to(minimum.dtype)
    for bit, (kind, position) in enumerate(zip((math.nan, math.inf, -math.inf), _kind_positions(kinds), strict=True)):
        chosen = (beyond == position[:, None]) & (kinds >> bit & 1 == 1)[:, None]
        result = result.masked_fill(chosen, kind)  # after the conversion, which need not keep a NaN's bits
    return result
