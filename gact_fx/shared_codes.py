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

from gact_fx.saved_tensors import Packed

# Address, dtype, shape, strides, and version: an operator in place changes the last of these alone.
Identity = tuple[int, torch.dtype, torch.Size, tuple[int, ...], int]
# Bits, group size, seed, rounding, and the order of dimensions, of which graphs may disagree: Inductor chooses layouts.
_Codec = tuple[int, int, int, str, tuple[int, ...]]


def identity(x: torch.Tensor) -> Identity:
    """What tells ``x`` from other tensors while its memory is held."""
    return x.data_ptr(), x.dtype, x.shape, x.stride(), x._version


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

    Codes are held for as long as the pass lasts, as they will be until backward; tensors are not.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._codes: dict[tuple[int, Identity], dict[_Codec, Packed]] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within, `compress_once` keeps its codes here."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def of(self, x: torch.Tensor) -> dict[_Codec, Packed]:
        """The codes of ``x``, to which others may be added."""
        return self._codes.setdefault((self._storages.number(x), identity(x)), {})

    def find(self, storage: int, what: Identity, bits: int) -> Packed | None:
        """Codes of ``bits`` bits or more, None where there are none."""
        return next((code for code in self._codes.get((storage, what), {}).values() if code.bits >= bits), None)


_active: ContextVar[SharedCodes | None] = ContextVar("gact_fx.shared_codes", default=None)


def _compress_once(
    x: torch.Tensor, bits: int, group_size: int, seed: int, order: Sequence[int], rounding: str
) -> torch.Tensor:
    dense = x.permute(tuple(order))

    def compress() -> torch.Tensor:
        blob: torch.Tensor = torch.ops.gact_fx.compress.default(dense, bits, group_size, seed, None, rounding)
        return blob

    shared = _active.get()
    if shared is None:
        return compress()
    codes = shared.of(x)
    codec = bits, group_size, seed, rounding, tuple(order)
    if codec not in codes:
        codes[codec] = Packed(compress(), dense.shape, x.dtype, tuple(order), bits, seed, rounding, group_size)
    return codes[codec].blob


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
