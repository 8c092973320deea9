"""The blob's layout in bytes, and the checks on the operators' arguments: shared by fakes and the reference.

A blob is ``[codes][minimum][step][mask]``:

- codes: ``ceil(numel / group_size)`` groups of ``group_size * bits / 8`` bytes, the last one padded to a full group;
- minimum: one element of the source's dtype per group;
- step: one bfloat16 per group;
- mask: only if a mask was given, or if the tensor itself is one (bool, or uint8): blocks of 256 elements in 32 bytes.

Element counts may be symbolic (``torch.SymInt``) throughout.
"""

from collections.abc import Sequence

import torch

__all__ = [
    "MASK_BLOCK",
    "MASK_DTYPES",
    "SOURCE_DTYPES",
    "blob_nbytes",
    "check_codes",
    "check_compress",
    "check_decompress",
    "group_count",
    "mask_nbytes",
]

SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A mask is bool, or uint8 whose nonzero elements are true: generated code reads and writes bytes faster than bools.
MASK_DTYPES = (torch.bool, torch.uint8)
MASK_BLOCK = 256
_STEP_BYTES = 2


def group_count(numel: int, group_size: int) -> int:
    """Return the number of groups that ``numel`` elements take, the last one perhaps padded."""
    return (numel + group_size - 1) // group_size


def mask_nbytes(numel: int) -> int:
    """Return the bytes of a packed mask of ``numel`` elements: 32 for every 256 elements begun."""
    return group_count(numel, MASK_BLOCK) * (MASK_BLOCK // 8)


def blob_nbytes(numel: int, dtype: torch.dtype, bits: int, group_size: int, mask_numel: int = 0) -> int:
    """Return the bytes of the blob for a tensor of ``numel`` elements.

    Args:
        numel: elements of the tensor; int or SymInt.
        dtype: float32, bfloat16, float16, or a mask's bool or uint8 (then ``bits`` and ``group_size`` do not matter).
        bits: width of a code, 1 to 8.
        group_size: elements that share a minimum and a step, a power of two from 32 to 1024.
        mask_numel: elements of the mask that is appended; int or SymInt.
    """
    if dtype in MASK_DTYPES:
        return mask_nbytes(numel)
    bytes_per_group = group_size * bits // 8 + dtype.itemsize + _STEP_BYTES
    return group_count(numel, group_size) * bytes_per_group + mask_nbytes(mask_numel)


def check_codes(op: str, bits: int, group_size: int) -> None:
    """Raise ValueError unless ``bits`` and ``group_size`` are ones that the format has; ``op`` names the caller."""
    if not 1 <= bits <= 8:
        raise ValueError(f"gact_fx.{op}: bits must lie in [1, 8], got {bits}")
    if not 32 <= group_size <= 1024 or group_size & (group_size - 1):
        raise ValueError(f"gact_fx.{op}: group_size must be a power of two in [32, 1024], got {group_size}")


def check_compress(x: torch.Tensor, bits: int, group_size: int, mask: torch.Tensor | None) -> None:
    """Raise ValueError unless the arguments of ``compress`` fit each other."""
    if x.dtype in MASK_DTYPES:
        if bits != 1:
            raise ValueError(f"gact_fx.compress: bits must be 1 for a mask, got {bits}")
        if mask is not None:
            raise ValueError("gact_fx.compress: mask must be None where the tensor is a mask itself")
        return
    if x.dtype not in SOURCE_DTYPES:
        raise ValueError(
            f"gact_fx.compress: dtype must be float32, bfloat16, float16, or bool or uint8 for a mask, got {x.dtype}"
        )
    check_codes("compress", bits, group_size)
    if mask is not None and mask.dtype not in MASK_DTYPES:
        raise ValueError(f"gact_fx.compress: mask must have dtype bool or uint8, got {mask.dtype}")
    if mask is not None and mask.device != x.device:
        raise ValueError(f"gact_fx.compress: mask must lie on {x.device}, got {mask.device}")


def check_decompress(blob: torch.Tensor, size: Sequence[int], dtype: torch.dtype, bits: int, group_size: int) -> None:
    """Raise ValueError unless the arguments of ``decompress`` fit each other; sizes against bytes are not compared."""
    if blob.dtype != torch.uint8 or blob.dim() != 1:
        raise ValueError(f"gact_fx.decompress: blob must be a 1-D uint8 tensor, got {blob.dim()}-D {blob.dtype}")
    if dtype not in (*MASK_DTYPES, *SOURCE_DTYPES):
        raise ValueError(
            f"gact_fx.decompress: dtype must be float32, bfloat16, float16, or bool or uint8 for a mask, got {dtype}"
        )
    if dtype not in MASK_DTYPES:
        check_codes("decompress", bits, group_size)
