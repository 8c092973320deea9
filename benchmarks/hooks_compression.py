"""GACT's way without a compiler, for `peers.py`: saved-tensor hooks that compress every saved activation alike.

As in GACT's own library (https://github.com/LiuXiaoxuanPKU/GACT-ICML), a tensor that several operators save is
compressed once; it is known again by its address, its layout and some of its values. Masks take one bit. Parameters,
buffers, small tensors, integers and the statistics of fused attention stay exact.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from gact_fx import ops

LEAST = 1024  # elements
SAMPLED = 3  # places of every dimension, at whose values a tensor is known again


@dataclass(frozen=True, eq=False)
class Compressed:
    """A saved tensor in ``bits`` bits an element, and what it takes to read it."""

    blob: Tensor
    shape: torch.Size
    dtype: torch.dtype
    bits: int
    group_size: int = 256

    def read(self) -> Tensor:
        return ops.decompress(self.blob, self.shape, self.dtype, self.bits, self.group_size)


class _Statistics(TorchDispatchMode):
    """Keeps the addresses of what fused attention returns beside its output."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if "scaled_dot_product" in str(func) and isinstance(found, tuple):
            self.addresses.update(part.data_ptr() for part in found[1:] if isinstance(part, Tensor))
        return found


class _Packer:
    """The two hooks of one forward."""

    def __init__(self, model: nn.Module, bits: int, statistics: _Statistics) -> None:
        self._bits, self._statistics, self._seed = bits, statistics, int(torch.randint(2**31, ()))
        self._state = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self._made: weakref.WeakValueDictionary[object, Compressed] = weakref.WeakValueDictionary()

    def pack(self, tensor: Tensor) -> Tensor | Compressed:
        is_state = tensor.untyped_storage().data_ptr() in self._state
        if is_state or tensor.numel() < LEAST or tensor.data_ptr() in self._statistics.addresses:
            return tensor
        if not tensor.is_floating_point() and tensor.dtype != torch.bool:
            return tensor
        if tensor.dtype == torch.bool:
            return self._compress(tensor, 1)
        key = _key(tensor)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._compress(tensor, self._bits)
        return made

    def unpack(self, packed: Tensor | Compressed) -> Tensor:
        return packed.read() if isinstance(packed, Compressed) else packed

    def _compress(self, tensor: Tensor, bits: int) -> Compressed:
        self._seed += 1
        return Compressed(ops.compress(tensor.detach(), bits, seed=self._seed), tensor.shape, tensor.dtype, bits)


def _key(tensor: Tensor) -> object:
    """What a tensor is known again by. An address alone is not enough: it may be another tensor's by now."""
    sample = tensor.detach()[tuple(slice(None, None, max(1, size // SAMPLED)) for size in tensor.shape)]
    values = tuple(sample.flatten().tolist())
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version, values


@contextmanager
def compress_saved_tensors(model: nn.Module, bits: int) -> Iterator[None]:
    """What autograd saves in this context takes ``bits`` bits an element (1 to 8), with stochastic rounding."""
    statistics = _Statistics()
    packer = _Packer(model, bits, statistics)
    with statistics, saved_tensors_hooks(packer.pack, packer.unpack):
        yield
