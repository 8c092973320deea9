"""Codes of activations that cross a graph break: made once in a forward pass, for all who hold them for backward.

Several graphs, several runs of one graph, or a graph and eager PyTorch may save the same activation. The plan gives it
one code (`gact_fx.passes.find_crossings`); ``gact_fx::compress_once`` makes it for the first who asks, and gives it to
everyone after. The operator has the same result without that, since the same tensor has the same codes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from gact_fx.saved_tensors import Packed, is_plain

# Address, dtype, shape, strides, whether signs are turned (the imaginary part of a conjugate), and version: an operator
# in place changes the last of these alone. Of what lies in memory row by row, every view that does has the same codes,
# and so the same identity.
Identity = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], bool, int]
# The numbers of the forward pass and of the storage in it, and what it is in there.
Activation = tuple[int, int, Identity]
# The order of dimensions in memory, and the shape that they are of; () where the order is their own.
Order = tuple[tuple[int, ...], ...]
# Bits, group size, seed, rounding and order. Graphs may disagree about that, since Inductor chooses layouts.
_Codec = tuple[int, int, int, str, Order]


def identity(x: torch.Tensor) -> Identity:
    """What tells ``x`` from other tensors while its memory is held, but for writes that autograd does not see either
    (``x.data``, NumPy)."""
    shape, stride = ((x.numel(),), (1,)) if x.is_contiguous() else (tuple(x.shape), x.stride())
    return x.data_ptr(), x.dtype, shape, stride, x.is_neg(), x._version


def activation(x: torch.Tensor) -> Activation:
    """What tells ``x`` from all that forward passes hold: in the next one, its address may be another tensor's."""
    shared = _active.get()
    number = (shared.number, shared.storages.number(x)) if shared is not None and is_plain(x) else (-1, -1)
    return *number, identity(x)


def order_key(order: Sequence[int], shape: Sequence[int]) -> Order:
    """What tells codes in that order of dimensions from others of the same tensor, or of a view of another shape."""
    return () if list(order) == sorted(order) else (tuple(order), tuple(shape))


class Storages:
    """The storages seen in one forward pass, numbered: they may take turns at one address. ``sizes`` are in bytes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def number(self, x: torch.Tensor) -> int:
        """The position of the storage of ``x`` in ``sizes``."""
        storage = x.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is not None and not known[0].expired():
            return known[1]
        self._known[storage._cdata] = StorageWeakRef(storage), len(self.sizes)
        self.sizes.append(storage.nbytes())
        return len(self.sizes) - 1


class SharedCodes:
    """The codes of one forward pass, by the tensors that they are of: the numbers of their storages, and identities.

    Neither tensors nor codes are held, which are there for as long as somebody has saved them for backward. ``number``
    is that of the forward pass.
    """

    def __init__(self, storages: Storages, number: int = 0) -> None:
        self.storages = storages
        self.number = number
        self._blobs: dict[tuple[int, Identity], dict[_Codec, TensorWeakRef]] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within, `compress_once` looks here for codes."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def get(self, x: torch.Tensor, codec: _Codec) -> torch.Tensor | None:
        """Codes of ``x``, None where nobody has made these."""
        blob = self._of(x).get(codec)
        return None if blob is None else blob()

    def put(self, x: torch.Tensor, codec: _Codec, blob: torch.Tensor) -> None:
        """Give ``blob`` to those who ask for these codes of ``x`` after."""
        self._of(x)[codec] = TensorWeakRef(blob)

    def find(self, storage: int, what: Identity, shape: torch.Size, bits: int) -> Packed | None:
        """The tensor of that ``shape`` in codes of ``bits`` bits or more, None where there are none."""
        for codec, reference in self._blobs.get((storage, what), {}).items():
            width, group_size, seed, rounding, ordered = codec
            order, of_shape = ordered or (tuple(range(len(shape))), tuple(shape))
            blob = reference() if width >= bits and of_shape == tuple(shape) else None
            if blob is not None:
                dense = torch.Size(shape[d] for d in order)
                return Packed(blob, dense, what[1], order, width, seed, rounding, group_size)
        return None

    def _of(self, x: torch.Tensor) -> dict[_Codec, TensorWeakRef]:
        return self._blobs.setdefault((self.storages.number(x), identity(x)), {})


_active: ContextVar[SharedCodes | None] = ContextVar("gact_fx.shared_codes", default=None)


def _compress_once(
    x: torch.Tensor, bits: int, group_size: int, seed: int, order: Sequence[int], rounding: str
) -> torch.Tensor:
    shared = _active.get()
    codec = bits, group_size, seed, rounding, order_key(order, x.shape)
    found = shared.get(x, codec) if shared is not None else None
    if found is not None:
        return found
    dense = x.permute(tuple(order))
    blob: torch.Tensor = torch.ops.gact_fx.compress.default(dense, bits, group_size, seed, None, rounding)
    if shared is not None:
        shared.put(x, codec, blob)
    return blob


def _compress_once_fake(
    x: torch.Tensor, bits: int, group_size: int, seed: int, order: Sequence[int], rounding: str
) -> torch.Tensor:
    blob: torch.Tensor = torch.ops.gact_fx.compress.default(
        x.permute(tuple(order)), bits, group_size, seed, None, rounding
    )
    return blob


_library = torch.library.Library("gact_fx", "FRAGMENT")
# The tensor itself, and not a view of it, of which nobody could say whether it is as old: hence the order.
_library.define(
    "compress_once(Tensor x, int bits, int group_size, int seed, int[] order, str rounding) -> Tensor",
    tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag),
)
_library.impl("compress_once", _compress_once, "CompositeExplicitAutograd")
torch.library.register_fake("gact_fx::compress_once", _compress_once_fake, lib=_library)
