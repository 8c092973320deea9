"""The operators in PyTorch alone: the oracle for the kernels, and what runs on devices that have none.

The arithmetic stands in `gact_fx.codec.arithmetic`, the bytes in `gact_fx.codec.packing`; here tensors are cut into
groups and blobs put together. `compress` and `decompress` work in chunks, so that their temporaries stay small;
`compress_whole` and `decompress_whole` give the same without a loop, for a compiler that fuses them
(`gact_fx.passes.fuse_codec`).
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gact_fx.codec import arithmetic, packing, rotation
from gact_fx.codec.by_place import count_places, runs_of
from gact_fx.codec.code import MASK_CODE, Code
from gact_fx.codec.layout import (
    BFLOAT16_BITS,
    INTEGER_BLOCK,
    INTEGER_DTYPES,
    MASK_DTYPES,
    blob_nbytes,
    check_compress,
    check_decompress,
    group_count,
    metadata_nbytes,
    rounding_of,
)
from gact_fx.errors import UsageError
from gact_fx.graphs.operators import assert_async

_CHUNK = 1 << 20  # elements; a temporary of 32-bit words then takes 4 MiB


def compress(
    x: Tensor,
    bits: int,
    group_size: int,
    seed: int,
    mask: Tensor | None = None,
    rounding: str = "stochastic",
    by_place: str = "",
) -> Tensor:
    """Compress a tensor; `gact_fx.ops.compress` tells shapes, dtypes and errors."""
    check_compress(x, bits, group_size, mask, rounding, by_place)
    if by_place:
        return _compress_runs(compress, x, group_size, seed, mask, rounding, by_place)
    code = _code_for(x.dtype, bits, group_size, seed, rounding)
    mask_numel = 0 if mask is None else mask.numel()
    blob = x.new_empty(blob_nbytes(x.numel(), x.dtype, bits, group_size, mask_numel), dtype=torch.uint8)
    flat = x.reshape(-1)
    *sections, rest = _sections(blob, x.dtype, x.numel(), code)
    for first, last in _chunks(x.numel(), code):
        chunk = flat[first * code.group_size : last * code.group_size]
        if x.dtype in INTEGER_DTYPES and not _is_mask(x.dtype, bits):
            _check_range(chunk, bits)
        for section, part in zip(sections, _encode(chunk, code, first), strict=True):
            section[first:last] = part
    if mask is not None:
        rest.copy_(compress(mask, 1, group_size, seed))
    return blob


def decompress(
    blob: Tensor,
    size: Sequence[int],
    dtype: torch.dtype,
    bits: int,
    group_size: int,
    seed: int = 0,
    rounding: str = "stochastic",
    by_place: str = "",
) -> Tensor:
    """Decompress a blob; `gact_fx.ops.decompress` tells shapes, dtypes and errors."""
    check_decompress(blob, size, dtype, bits, group_size, rounding, by_place)
    if any(extent < 0 for extent in size):
        raise UsageError(f"gact_fx.decompress: size must not be negative, got {list(size)}")
    numel = math.prod(size)
    nbytes = blob_nbytes(numel, dtype, bits, group_size, by_place=by_place)
    if blob.numel() < nbytes:
        raise UsageError(
            f"gact_fx.decompress: blob must have at least {nbytes} bytes for size {list(size)}, got {blob.numel()}"
        )
    if by_place:
        return _decompress_runs(decompress, blob, size, dtype, group_size, seed, rounding, by_place)
    code = _code_for(dtype, bits, group_size, seed, rounding)
    *sections, _ = _sections(blob, dtype, numel, code)
    result = blob.new_empty(numel, dtype=dtype)
    for first, last in _chunks(numel, code):
        start = first * code.group_size
        values = _decode([section[first:last] for section in sections], dtype, code, first)
        result[start : last * code.group_size] = values[: numel - start]
    return result.view(size)


def compress_whole(
    x: Tensor,
    bits: int,
    group_size: int,
    seed: int,
    mask: Tensor | None = None,
    rounding: str = "stochastic",
    by_place: str = "",
) -> Tensor:
    """`compress` as one expression: no chunks, no writes in place, no branch on data. Integers are not checked."""
    check_compress(x, bits, group_size, mask, rounding, by_place)
    if by_place:
        return _compress_runs(compress_whole, x, group_size, seed, mask, rounding, by_place)
    parts = _encode(x.reshape(-1), _code_for(x.dtype, bits, group_size, seed, rounding), 0)
    if mask is not None:
        parts += _encode(mask.reshape(-1), MASK_CODE, 0)
    return torch.cat([part.reshape(-1) for part in parts])


def decompress_whole(
    blob: Tensor,
    size: Sequence[int],
    dtype: torch.dtype,
    bits: int,
    group_size: int,
    seed: int = 0,
    rounding: str = "stochastic",
    by_place: str = "",
) -> Tensor:
    """`decompress` as one expression."""
    check_decompress(blob, size, dtype, bits, group_size, rounding, by_place)
    if by_place:
        return _decompress_runs(decompress_whole, blob, size, dtype, group_size, seed, rounding, by_place)
    code, numel = _code_for(dtype, bits, group_size, seed, rounding), math.prod(size)
    *sections, _ = _sections(blob, dtype, numel, code)
    return _decode(sections, dtype, code, 0)[:numel].view(size)


def _code_for(dtype: torch.dtype, bits: int, group_size: int, seed: int, rounding: str) -> Code:
    """The code of tensors of a dtype; blocks are the groups of integers."""
    if dtype in INTEGER_DTYPES:
        return Code(1 if dtype == torch.bool else bits, group_size=INTEGER_BLOCK)
    return Code(bits, rounding_of(rounding, bits), group_size, seed)


# ---- Widths by place ---------------------------------------------------------------------------------------------


def _compress_runs(
    compress: Callable[..., Tensor],
    x: Tensor,
    group_size: int,
    seed: int,
    mask: Tensor | None,
    rounding: str,
    by_place: str,
) -> Tensor:
    """The blobs of the runs, each with a seed of its own, and that of the mask."""
    rows = x.reshape(-1, count_places(by_place), group_size)
    parts = [
        compress(rows[:, run.first : run.first + run.count], run.bits, group_size, seed + at, None, rounding)
        for at, run in enumerate(runs_of(by_place))
    ]
    return torch.cat(parts if mask is None else [*parts, compress(mask, 1, group_size, seed)])


def _decompress_runs(
    decompress: Callable[..., Tensor],
    blob: Tensor,
    size: Sequence[int],
    dtype: torch.dtype,
    group_size: int,
    seed: int,
    rounding: str,
    by_place: str,
) -> Tensor:
    rows = math.prod(size) // (count_places(by_place) * group_size)
    parts, start = [], 0
    for at, run in enumerate(runs_of(by_place)):
        end = start + blob_nbytes(rows * run.count * group_size, dtype, run.bits, group_size)
        shape = (rows, run.count * group_size)
        parts.append(decompress(blob[start:end], shape, dtype, run.bits, group_size, seed + at, rounding))
        start = end
    return torch.cat(parts, 1).view(size)


# ---- Groups -----------------------------------------------------------------------------------------------------


def _encode(flat: Tensor, code: Code, first: int) -> tuple[Tensor, ...]:
    """Return the sections of groups ``first``, ``first`` + 1, ..., a row of bytes per group each."""
    bits = code.bits
    if flat.dtype in INTEGER_DTYPES:
        if _is_mask(flat.dtype, bits):
            flat = flat.ne(0)
        rows = _rows(flat.to(torch.int32), INTEGER_BLOCK)
        return (packing.pack(_without_padding(rows, flat), bits),)
    rows = _rows(flat, code.group_size)
    groups = torch.arange(first, first + rows.shape[0], device=flat.device)
    if bits == BFLOAT16_BITS:
        codes = arithmetic.round_to_bfloat16(rows, code, groups)
        return (packing.words_to_bytes(_without_padding(codes, flat), 2),)
    if code.rounding == "rotated":
        # The codes of the padding stay: every element of the group is read from all of them.
        codes, minimum, step = rotation.quantize_rotated(rows, code, groups)
    else:
        codes, minimum, step = arithmetic.quantize(rows, code, groups)
        codes = _without_padding(codes, flat)
    return (
        packing.pack(codes, bits),
        packing.words_to_bytes(minimum[:, None], flat.dtype.itemsize),
        packing.words_to_bytes(step[:, None], 2),
    )


def _decode(parts: Sequence[Tensor], dtype: torch.dtype, code: Code, first: int) -> Tensor:
    """Return the elements of the groups whose sections are ``parts``, those of the padding included; 1-D."""
    if dtype in INTEGER_DTYPES:
        return packing.unpack(parts[0], code.bits, INTEGER_BLOCK).view(-1).to(dtype)
    if code.bits == BFLOAT16_BITS:
        words = packing.bytes_to_words(parts[0], 2)
        return (words << 16).view(torch.float32).view(-1)
    packed, minimum_bytes, step_bytes = parts
    codes = packing.unpack(packed, code.bits, code.group_size)
    minimum = packing.bytes_to_words(minimum_bytes, dtype.itemsize)[:, 0]
    step = packing.bytes_to_words(step_bytes, 2)[:, 0]
    groups = torch.arange(first, first + packed.shape[0], device=packed.device)
    dequantize = rotation.dequantize_rotated if code.rounding == "rotated" else arithmetic.dequantize
    return dequantize(codes, minimum, step, dtype, code, groups).view(-1)


def _sections(blob: Tensor, dtype: torch.dtype, numel: int, code: Code) -> tuple[Tensor, ...]:
    """Return views of the blob's sections, one row of bytes per group, and of what is behind them."""
    groups = group_count(numel, code.group_size)
    widths = [code.group_size * code.bits // 8]
    start = 0
    if dtype in INTEGER_DTYPES:
        start = blob.numel() - groups * widths[0]
    elif metadata_nbytes(dtype, code.bits):
        widths += [dtype.itemsize, metadata_nbytes(dtype, code.bits) - dtype.itemsize]
    sections = []
    for width in widths:
        sections.append(blob[start : start + groups * width].view(groups, width))
        start += groups * width
    return (*sections, blob[start:])


def _chunks(numel: int, code: Code) -> Iterator[tuple[int, int]]:
    """Yield the first group of every chunk, and the one behind its last."""
    groups, per_chunk = group_count(numel, code.group_size), _CHUNK // code.group_size
    for first in range(0, groups, per_chunk):
        yield first, min(first + per_chunk, groups)


def _rows(flat: Tensor, group_size: int) -> Tensor:
    """Return the elements as rows of a group each; the last element pads the last group, so its extremes stay."""
    numel = flat.shape[0]
    padded = group_count(numel, group_size) * group_size
    if isinstance(numel, torch.SymInt):
        return flat[torch.arange(padded, device=flat.device).clamp(max=numel - 1)].view(-1, group_size)
    if padded > numel:
        flat = torch.cat([flat, flat[-1:].expand(padded - numel)])
    return flat.view(-1, group_size)


def _without_padding(codes: Tensor, flat: Tensor) -> Tensor:
    """Return codes (groups, group_size) with zeros behind the last element."""
    numel = flat.shape[0]
    if not isinstance(numel, torch.SymInt) and codes.numel() == numel:
        return codes
    index = torch.arange(codes.numel(), device=codes.device).view_as(codes)
    return torch.where(index < numel, codes, 0)


def _is_mask(dtype: torch.dtype, bits: int) -> bool:
    return dtype in MASK_DTYPES and bits == 1


def _check_range(values: Tensor, bits: int) -> None:
    low, high = values.aminmax()
    inside = (low >= 0) & (high.to(torch.int64) < 1 << bits)
    message = f"gact_fx.compress: integers must lie in [0, {1 << bits}) at {bits} bits"
    if values.device.type == "cpu":
        if not inside:
            raise UsageError(f"{message}, got values from {int(low)} to {int(high)}")
    else:  # without waiting for the device
        assert_async(inside, message)
