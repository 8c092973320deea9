"""Compression of what eager autograd saves: for profiling, which must fit in memory where training does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gact_fx import ops
from gact_fx.codec_layout import SOURCE_DTYPES

BITS = 8
GROUP_SIZE = 256
MIN_ELEMENTS = 4096
# Attention masks add numbers of this size and more to scores where a difference of one matters, and codes are as coarse
# as a 255th of them. Activations, whose errors count in proportion, hardly grow so large.
MAX_MAGNITUDE = 1e4


@contextlib.contextmanager
def compressed_saved_tensors() -> Iterator[None]:
    """Store what eager operators save for backward in 8 bits per element.

    Parameters, small and sparse tensors, and those with huge, infinite or NaN values stay as they are.
    """
    # Neighbours in one graph would otherwise be rounded by the same noise.
    seeds = iter(range(2**62))

    def pack(x: torch.Tensor) -> Any:
        is_parameter = x.is_leaf and x.requires_grad
        is_codable = x.dtype in SOURCE_DTYPES and x.layout is torch.strided
        if is_parameter or not is_codable or x.numel() < MIN_ELEMENTS:
            return x
        strides = x.stride()
        order = sorted(range(x.dim()), key=lambda d: (-strides[d], d))
        dense = x.detach().permute(order)
        # An expanded tensor is smaller in memory than its codes.
        if x.untyped_storage().nbytes() < x.numel() * x.element_size() // 2:
            return x
        # NaN compares as false.
        if not all(bound.abs() < MAX_MAGNITUDE for bound in dense.aminmax()):
            return x
        return ops.compress(dense, BITS, GROUP_SIZE, next(seeds)), dense.shape, x.dtype, order

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        blob, shape, dtype, order = packed
        inverse = sorted(range(len(order)), key=lambda d: order[d])
        return ops.decompress(blob, shape, dtype, BITS, GROUP_SIZE).permute(inverse)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
