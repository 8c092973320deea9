"""The operators in PyTorch alone: the oracle for the kernels, and what runs on devices that have none.

The arithmetic stands in `gact_fx.codec.arithmetic`, the bytes in `gact_fx.codec.packing`; here tensors are cut into
groups and blobs put together. `compress` and `decompress` work in chunks, so that their temporaries stay small;
`compress_whole` and `decompress_whole` give the same without a loop, for a compiler that fuses them
(`gact_fx.passes.fuse_codec`).
"""

import math
from collections.abc import Iterator, Sequence

import torch

from gact_fx.codec import arithmetic, packing
from gact_fx.codec.layout import (
    BFLOAT16_BITS,
    INTEGER_BLOCK,
    INTEGER_DTYPES,
    MASK_DTYPES,
    blob_nbytes,
    check_compress,
    check_decompress,
    group_count,
    integers_nbytes,
    metadata_nbytes,
)
from gact_fx.graphs.operators import assert_async

__all__ = ["compress", "compress_whole", "decompress", "decompress_whole"]

_CHUNK = 1 << 20  # elements; a temporary of 32-bit words then takes 4 MiB


def compress(
    x: torch.Tensor,
    bits: int,
    group_size: int,
    seed: int,
    mask: torch.Tensor | None = None,
    rounding: str = "stochastic",
) -> torch.Tensor:
    """Compress a tensor; `gact_fx.ops.compress` tells shapes, dtypes and errors."""
    check_compress(x, bits, group_size, mask, rounding)
    if x.dtype in INTEGER_DTYPES:
        return _compress_integers(x, bits)
    mask_numel = 0 if mask is None else mask.numel()
    blob = x.new_empty(blob_nbytes(x.numel(), x.dtype, bits, group_size, mask_numel), dtype=torch.uint8)
    flat = x.reshape(-1)
    groups = group_count(flat.numel(), group_size)
    *sections, rest = _sections(blob, x.dtype, groups, bits, group_size)
    for first, last in _chunks(groups, group_size):
        chunk = flat[first * group_size : last * group_size]
        parts = _compress_groups(chunk, bits, group_size, seed, first, rounding)
        for section, part in zip(sections, parts, strict=True):
            section[first:last] = part
    if mask is not None:
        rest.copy_(_compress_integers(mask, 1))
    return blob


def decompress(
    blob: torch.Tensor,
    size: Sequence[int],
    dtype: torch.dtype,
    bits: int,
    group_size: int,
    seed: int = 0,
    rounding: str = "stochastic",
) -> torch.Tensor:
    """Decompress a blob; `gact_fx.ops.decompress` tells shapes, dtypes and errors."""
    check_decompress(blob, size, dtype, bits, group_size, rounding)
    bits = 1 if dtype == torch.bool else bits
    if any(extent < 0 for extent in size):
        raise ValueError(f"gact_fx.decompress: size must not be negative, got {list(size)}")
    numel = math.prod(size)
    nbytes = blob_nbytes(numel, dtype, bits, group_size)
    if blob.numel() < nbytes:
        raise ValueError(
            f"gact_fx.decompress: blob must have at least {nbytes} bytes for size {list(size)}, got {blob.numel()}"
        )
    result = blob.new_empty(numel, dtype=dtype)
    if dtype in INTEGER_DTYPES:
        packed, group_size = blob[blob.numel() - nbytes :], INTEGER_BLOCK
        packed = packed.view(group_count(numel, INTEGER_BLOCK), integers_nbytes(1, bits))
        for first, last in _chunks(packed.shape[0], INTEGER_BLOCK):
            values = _decompress_integers(packed[first:last], dtype, bits)
            result[first * INTEGER_BLOCK : last * INTEGER_BLOCK] = values[: numel - first * INTEGER_BLOCK]
        return result.view(size)
    groups = group_count(numel, group_size)
    *sections, _ = _sections(blob, dtype, groups, bits, group_size)
    for first, last in _chunks(groups, group_size):
        parts = tuple(section[first:last] for section in sections)
        values = _decompress_groups(parts, dtype, bits, group_size, seed, first, rounding)
        result[first * group_size : last * group_size] = values[: numel - first * group_size]
    return result.view(size)


def compress_whole(
    x: torch.Tensor,
    bits: int,
    group_size: int,
    seed: int,
    mask: torch.Tensor | None = None,
    rounding: str = "stochastic",
) -> torch.Tensor:
    """`compress` as one expression: no chunks, no writes in place, no branch on data. Integers are not checked."""
    check_compress(x, bits, group_size, mask, rounding)
    if x.dtype in INTEGER_DTYPES:
        return _pack_integers(x.reshape(-1), bits)
    parts = _compress_groups(x.reshape(-1), bits, group_size, seed, 0, rounding)
    tail = [] if mask is None else [_pack_integers(mask.reshape(-1), 1)]
    return torch.cat([*(part.reshape(-1) for part in parts), *tail])


def decompress_whole(
    blob: torch.Tensor,
    size: Sequence[int],
    dtype: torch.dtype,
    bits: int,
    group_size: int,
    seed: int = 0,
    rounding: str = "stochastic",
) -> torch.Tensor:
    """`decompress` as one expression."""
    check_decompress(blob, size, dtype, bits, group_size, rounding)
    bits = 1 if dtype == torch.bool else bits
    numel = math.prod(size)
    if dtype in INTEGER_DTYPES:
        nbytes = blob_nbytes(numel, dtype, bits, group_size)
        packed = blob[blob.numel() - nbytes :].view(group_count(numel, INTEGER_BLOCK), integers_nbytes(1, bits))
        values = _decompress_integers(packed, dtype, bits)
    else:
        *sections, _ = _sections(blob, dtype, group_count(numel, group_size), bits, group_size)
        values = _decompress_groups(tuple(sections), dtype, bits, group_size, seed, 0, rounding)
    return values[:numel].view(size)


# ---- Groups -----------------------------------------------------------------------------------------------------


def _compress_groups(
    flat: torch.Tensor, bits: int, group_size: int, seed: int, first: int, rounding: str
) -> tuple[torch.Tensor, ...]:
    """Return the sections of groups ``first``, ``first`` + 1, ..., a row of bytes per group each."""
    rows = _rows(flat, group_size)
    groups = torch.arange(first, first + rows.shape[0], device=flat.device)
    if bits == BFLOAT16_BITS:
        codes = arithmetic.round_to_bfloat16(rows, seed, groups, rounding)
        return (packing.words_to_bytes(_without_padding(codes, flat), 2),)
    codes, minimum, step = arithmetic.quantize(rows, bits, seed, groups, rounding)
    return (
        packing.pack(_without_padding(codes, flat), bits),
        packing.words_to_bytes(minimum[:, None], flat.dtype.itemsize),
        packing.words_to_bytes(step[:, None], 2),
    )


def _decompress_groups(
    parts: tuple[torch.Tensor, ...],
    dtype: torch.dtype,
    bits: int,
    group_size: int,
    seed: int,
    first: int,
    rounding: str,
) -> torch.Tensor:
    """Return the elements of the groups whose sections are ``parts``, those of the padding included; 1-D."""
    if bits == BFLOAT16_BITS:
        words = packing.bytes_to_words(parts[0], 2)
        return (words << 16).view(torch.float32).view(-1)
    packed, minimum_bytes, step_bytes = parts
    codes = packing.unpack(packed, bits, group_size)
    minimum = packing.bytes_to_words(minimum_bytes, dtype.itemsize)[:, 0]
    step = packing.bytes_to_words(step_bytes, 2)[:, 0]
    groups = torch.arange(first, first + packed.shape[0], device=packed.device)
    return arithmetic.dequantize(codes, minimum, step, dtype, bits, seed, groups, rounding).view(-1)


def _sections(
    blob: torch.Tensor, dtype: torch.dtype, groups: int, bits: int, group_size: int
) -> tuple[torch.Tensor, ...]:
    """Return views of the blob's sections, one row of bytes per group, and of what is behind them."""
    widths = [group_size * bits // 8]
    if metadata_nbytes(dtype, bits):
        widths += [dtype.itemsize, metadata_nbytes(dtype, bits) - dtype.itemsize]
    sections = []
    start = 0
    for width in widths:
        sections.append(blob[start : start + groups * width].view(groups, width))
        start += groups * width
    return (*sections, blob[start:])


def _chunks(groups: int, group_size: int) -> Iterator[tuple[int, int]]:
    per_chunk = _CHUNK // group_size
    for first in range(0, groups, per_chunk):
        yield first, min(first + per_chunk, groups)


def _rows(flat: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return the elements as rows of a group each; the last element pads the last group, so its extremes stay."""
    numel = flat.shape[0]
    padded = group_count(numel, group_size) * group_size
    if isinstance(numel, torch.SymInt):
        return flat[torch.arange(padded, device=flat.device).clamp(max=numel - 1)].view(-1, group_size)
    if padded > numel:
        flat = torch.cat([flat, flat[-1:].expand(padded - numel)])
    return flat.view(-1, group_size)


def _without_padding(codes: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Return codes (groups, group_size) with zeros behind the last element."""
    numel = flat.shape[0]
    if not isinstance(numel, torch.SymInt) and codes.numel() == numel:
        return codes
    index = torch.arange(codes.numel(), device=codes.device).view_as(codes)
    return torch.where(index < numel, codes, 0)


# ---- Integers and masks -----------------------------------------------------------------------------------------


def _compress_integers(x: torch.Tensor, bits: int) -> torch.Tensor:
    flat = x.reshape(-1)
    packed = x.new_empty(blob_nbytes(x.numel(), x.dtype, bits, INTEGER_BLOCK), dtype=torch.uint8)
    rows = packed.view(group_count(x.numel(), INTEGER_BLOCK), integers_nbytes(1, bits))
    for first, last in _chunks(rows.shape[0], INTEGER_BLOCK):
        chunk = flat[first * INTEGER_BLOCK : last * INTEGER_BLOCK]
        if not _is_mask(x.dtype, bits):
            _check_range(chunk, bits)
        rows[first:last] = _pack_integers(chunk, bits).view(last - first, -1)
    return packed


def _is_mask(dtype: torch.dtype, bits: int) -> bool:
    return dtype in MASK_DTYPES and bits == 1


def _check_range(values: torch.Tensor, bits: int) -> None:
    low, high = values.aminmax()
    inside = (low >= 0) & (high.to(torch.int64) < 1 << bits)
    message = f"gact_fx.compress: integers must lie in [0, {1 << bits}) at {bits} bits"
    if values.device.type == "cpu":
        if not inside:
            raise ValueError(f"{message}, got values from {int(low)} to {int(high)}")
    else:  # without waiting for the device
        assert_async(inside, message)


def _pack_integers(flat: torch.Tensor, bits: int) -> torch.Tensor:
    if _is_mask(flat.dtype, bits):
        flat = flat.ne(0)
    codes = _rows(flat.to(torch.int32), INTEGER_BLOCK)
    return packing.pack(_without_padding(codes, flat), bits).view(-1)


def _decompress_integers(packed: torch.Tensor, dtype: torch.dtype, bits: int) -> torch.Tensor:
    codes = packing.unpack(packed, bits, INTEGER_BLOCK)
    return codes.view(-1).to(dtype)
