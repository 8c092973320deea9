"""Bytes that saved tensors hold between forward and backward."""

from __future__ import annotations

from gact_fx.codec.layout import blob_nbytes, integers_nbytes
from gact_fx.plan import TensorPlan
from gact_fx.records import KEEP, MASK, PACK, Eligibility, GraphAnalysis, SavedTensor


def is_counted(tensor: SavedTensor) -> bool:
    """Whether backward alone holds the tensor's memory, or may: parameters and the caller's inputs cost nothing."""
    return tensor.owner in ("nobody", "output")


def coded_nbytes(tensor: SavedTensor, how: Eligibility, entry: TensorPlan) -> int:
    """Bytes of a quantized tensor's blob, its masks included."""
    assert tensor.dtype is not None and entry.bits is not None
    masks = how.mask_numel - (tensor.numel if entry.merged else 0)
    return int(blob_nbytes(tensor.numel, tensor.dtype, entry.bits, entry.group_size, masks))


def exact_nbytes(tensor: SavedTensor, how: Eligibility) -> int:
    """Bytes of a mask or of packed integers; 0 for what is stored otherwise."""
    if how.encoding == MASK:
        return integers_nbytes(how.mask_numel or tensor.numel)
    return integers_nbytes(tensor.numel, how.min_bits) if how.encoding == PACK else 0


def fixed_nbytes(analysis: GraphAnalysis) -> int:
    """Bytes that a graph holds whatever the plan: what is kept, masks and packed integers."""
    kept: dict[int, int] = {}
    exact = 0
    for tensor, how in zip(analysis.saved, analysis.eligibility, strict=True):
        if how.encoding == KEEP and is_counted(tensor):
            kept[tensor.storage] = tensor.storage_nbytes
        exact += exact_nbytes(tensor, how)
    return sum(kept.values()) + exact
