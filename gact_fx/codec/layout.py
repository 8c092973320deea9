"""The blob's layout in bytes, and the checks on the operators' arguments: shared by fakes and the reference.

The blob of a float tensor is ``[codes][minimum][step][mask]``:

- codes: ``ceil(numel / group_size)`` groups of ``group_size * bits / 8`` bytes, the last one padded to a full group;
- minimum: one element of the source's dtype per group;
- step: one bfloat16 per group;
- mask: only if a mask was given, in blocks of 256 elements in 32 bytes.

At 16 bits the codes are bfloat16 numbers, without minimum and step. The blob of an integer tensor, or of a mask
itself, is blocks of 256 elements in ``32 * bits`` bytes.

With widths by place the codes, minima and steps of one run of groups come one behind the other, run after run, and the
mask at the end (`gact_fx.codec.by_place`).

Element counts may be symbolic (``torch.SymInt``) throughout.
"""

import math
from collections.abc import Sequence

import torch

from gact_fx.codec.by_place import count_places, runs_of
from gact_fx.errors import UsageError

SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGER_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# A mask is bool, or uint8 whose nonzero elements are true: generated code reads and writes bytes faster than bools.
MASK_DTYPES = (torch.bool, torch.uint8)
ROUNDINGS = ("stochastic", "dither", "nearest", "rotated")
# The widest codes of rotated groups.
ROTATED_BITS = 4
INTEGER_BLOCK = 256
BFLOAT16_BITS = 16
_STEP_BYTES = 2
_DTYPES = "float32, bfloat16, float16, float64, or bool or an integer to be packed exactly"


def rounding_of(rounding: str, bits: int) -> str:
    """How codes of ``bits`` are rounded: wide ones that are to be rotated have dither, which adds as little there."""
    return "dither" if rounding == "rotated" and bits > ROTATED_BITS else rounding


def group_count(numel: int, group_size: int) -> int:
    """Return the number of groups that ``numel`` elements take, the last one perhaps padded."""
    return (numel + group_size - 1) // group_size


def integers_nbytes(numel: int, bits: int = 1) -> int:
    """Return the bytes of packed integers, or at one bit of a mask: ``32 * bits`` for every 256 elements begun."""
    return group_count(numel, INTEGER_BLOCK) * (INTEGER_BLOCK // 8 * bits)


def metadata_nbytes(dtype: torch.dtype, bits: int) -> int:
    """Return the bytes of one group's minimum and step."""
    return 0 if bits == BFLOAT16_BITS else dtype.itemsize + _STEP_BYTES


def blob_nbytes(
    numel: int, dtype: torch.dtype, bits: int, group_size: int, mask_numel: int = 0, by_place: str = ""
) -> int:
    """Return the bytes of the blob for ``numel`` elements of a dtype, with a mask of ``mask_numel`` behind them.

    Dtype, bits and group size are what `gact_fx.ops.compress` takes; for integers the group size does not matter.
    """
    if dtype in INTEGER_DTYPES:
        return integers_nbytes(numel, 1 if dtype == torch.bool else bits)
    if by_place:
        rows = numel // (count_places(by_place) * group_size)
        runs = (blob_nbytes(rows * run.count * group_size, dtype, run.bits, group_size) for run in runs_of(by_place))
        return sum(runs) + integers_nbytes(mask_numel)
    per_group = group_size * bits // 8 + metadata_nbytes(dtype, bits)
    return group_count(numel, group_size) * per_group + integers_nbytes(mask_numel)


def check_rounding(op: str, rounding: str, bits: int) -> None:
    """Raise ValueError unless ``rounding`` is one that codes of this width can have; ``op`` names the caller."""
    if rounding not in ROUNDINGS:
        raise UsageError(f"gact_fx.{op}: rounding must be one of {ROUNDINGS}, got {rounding!r}")
    if rounding in ("dither", "rotated") and bits == BFLOAT16_BITS:
        raise UsageError(f"gact_fx.{op}: rounding {rounding!r} needs bits in [1, 8], got 16; use 'stochastic'")


def _check_codes(
    op: str, numel: int, dtype: torch.dtype, bits: int, group_size: int, rounding: str, by_place: str
) -> None:
    if by_place and dtype in INTEGER_DTYPES:
        raise UsageError(f"gact_fx.{op}: by_place must be '' for masks and integers, got {by_place!r}")
    if dtype in INTEGER_DTYPES:
        if dtype != torch.bool and not 1 <= bits <= 16:
            raise UsageError(f"gact_fx.{op}: bits must lie in [1, 16] for integers, got {bits}")
        return
    if bits == BFLOAT16_BITS and dtype != torch.float32:
        raise UsageError(f"gact_fx.{op}: 16 bits (bfloat16) are for float32 tensors, got {dtype}")
    if not 1 <= bits <= 8 and bits != BFLOAT16_BITS:
        raise UsageError(f"gact_fx.{op}: bits must lie in [1, 8], or be 16 for bfloat16, got {bits}")
    if not 32 <= group_size <= 1024 or group_size & (group_size - 1):
        raise UsageError(f"gact_fx.{op}: group_size must be a power of two in [32, 1024], got {group_size}")
    check_rounding(op, rounding, bits)
    places = count_places(by_place)
    if by_place and numel % (places * group_size):
        raise UsageError(
            f"gact_fx.{op}: by_place must be for whole rows, got {places} groups of {group_size} for {numel} elements"
        )


def check_compress(
    x: torch.Tensor, bits: int, group_size: int, mask: torch.Tensor | None, rounding: str, by_place: str = ""
) -> None:
    """Raise ValueError unless the arguments of ``compress`` fit each other."""
    if x.dtype not in (*SOURCE_DTYPES, *INTEGER_DTYPES):
        raise UsageError(f"gact_fx.compress: dtype must be {_DTYPES}, got {x.dtype}")
    if x.dtype == torch.bool and bits != 1:
        raise UsageError(f"gact_fx.compress: bits must be 1 for a mask, got {bits}")
    if x.dtype in INTEGER_DTYPES and mask is not None:
        raise UsageError("gact_fx.compress: mask must be None where the tensor is a mask or integer itself")
    _check_codes("compress", x.numel(), x.dtype, bits, group_size, rounding, by_place)
    if mask is not None and mask.dtype not in MASK_DTYPES:
        raise UsageError(f"gact_fx.compress: mask must have dtype bool or uint8, got {mask.dtype}")
    if mask is not None and mask.device != x.device:
        raise UsageError(f"gact_fx.compress: mask must lie on {x.device}, got {mask.device}")


def check_decompress(
    blob: torch.Tensor,
    size: Sequence[int],
    dtype: torch.dtype,
    bits: int,
    group_size: int,
    rounding: str,
    by_place: str = "",
) -> None:
    """Raise ValueError unless the arguments of ``decompress`` fit each other; sizes against bytes are not compared."""
    if blob.dtype != torch.uint8 or blob.dim() != 1:
        raise UsageError(f"gact_fx.decompress: blob must be a 1-D uint8 tensor, got {blob.dim()}-D {blob.dtype}")
    if dtype not in (*SOURCE_DTYPES, *INTEGER_DTYPES):
        raise UsageError(f"gact_fx.decompress: dtype must be {_DTYPES}, got {dtype}")
    _check_codes("decompress", math.prod(size), dtype, bits, group_size, rounding, by_place)
