"""Compression of what autograd keeps outside of rewritten graphs: in profiling, and in eager PyTorch between graphs."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gact_fx.codec import operators
from gact_fx.codec.code import MASK_CODE, Code
from gact_fx.codec.layout import SOURCE_DTYPES, blob_nbytes

BITS = 8
GROUP_SIZE = 256
MIN_ELEMENTS = 4096
# Attention masks add numbers of this size and more to scores where a difference of one matters, and codes are as coarse
# as a 255th of them. Activations, whose errors count in proportion, hardly grow so large.
MAX_MAGNITUDE = 1e4


@dataclass(frozen=True)
class Packed:
    """A tensor as codes, a boolean one in 1 bit per element; ``order`` lists its dimensions as they lie in memory."""

    blob: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype
    order: Sequence[int]
    code: Code

    def unpack(self) -> torch.Tensor:
        dense = operators.decompress(self.blob, self.shape, self.dtype, *self.code.to_decompress())
        return dense.permute(sorted(range(len(self.order)), key=lambda d: self.order[d]))


def pack(x: torch.Tensor, seed: int, bits: int = BITS) -> Packed | torch.Tensor:
    """``x`` in ``bits`` per element, or ``x`` itself where 8 would save little or lose much."""
    if x.layout is not torch.strided or packed_nbytes(x.dtype, x.numel()) == x.nbytes or is_expanded(x):
        return x
    # NaN compares as false.
    if x.dtype is not torch.bool and not all(bound.abs() < MAX_MAGNITUDE for bound in x.detach().aminmax()):
        return x
    return pack_in(x, Code(bits, group_size=GROUP_SIZE, seed=seed))


def pack_in(x: torch.Tensor, code: Code) -> Packed:
    """``x``, which is dense and of a dtype that can be coded, in ``code``, or in 1 bit an element if it is boolean."""
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: (-strides[d], d))
    dense = x.detach().permute(order)
    if x.dtype is torch.bool:
        code = MASK_CODE
    return Packed(operators.compress(dense, *code.to_compress()), dense.shape, x.dtype, order, code)


def scale_of_mask(x: torch.Tensor) -> torch.Tensor | None:
    """The one value beside 0 in ``x``, None if there are several: dropout multiplies by such a mask."""
    if x.dtype is torch.bool or not x.numel():
        return None
    scale = x.max()
    return scale if torch.equal(x, (x != 0) * scale) else None


def is_expanded(x: torch.Tensor) -> bool:
    """Whether a tensor is smaller in memory than by its elements, and than its codes would be."""
    return x.untyped_storage().nbytes() < x.numel() * x.element_size() // 2


def packed_nbytes(dtype: torch.dtype, numel: int) -> int:
    """Bytes of a tensor as `pack` keeps it."""
    if numel < MIN_ELEMENTS or dtype not in (*SOURCE_DTYPES, torch.bool):
        return numel * dtype.itemsize
    return blob_nbytes(numel, dtype, BITS, GROUP_SIZE)


@contextlib.contextmanager
def compressed_saved_tensors() -> Iterator[None]:
    """Store what eager operators save for backward in 8 bits per element.

    Parameters, small and sparse tensors, and those with huge, infinite or NaN values stay as they are.
    """
    # Neighbours in one graph would otherwise be rounded by the same noise.
    seeds = iter(range(2**62))

    def keep(x: torch.Tensor) -> Packed | torch.Tensor:
        if x.is_leaf and x.requires_grad:
            return x
        kept = pack(x, next(seeds))
        # An operator's own result, with its history, would hold the operator that holds it.
        return kept.detach() if isinstance(kept, torch.Tensor) else kept

    def read(kept: Packed | torch.Tensor) -> torch.Tensor:
        return kept.unpack() if isinstance(kept, Packed) else kept

    with torch.autograd.graph.saved_tensors_hooks(keep, read):
        yield
