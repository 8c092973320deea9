"""The encodings: how a saved tensor is stored, a class each.

An encoding knows what it costs, how forward writes it and what backward then reads; `decide_eligibility` chooses one
for every saved tensor. A new encoding is a class here and a choice there.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from gact_fx.codec.code import MASK_CODE, Code
from gact_fx.codec.layout import BFLOAT16_BITS, integers_nbytes
from gact_fx.graphs.aot import SavedValue
from gact_fx.passes.find_bends import Coefficients
from gact_fx.passes.forward_editor import ForwardEditor
from gact_fx.passes.merge_masks import mark_stopped
from gact_fx.passes.reads import CoefficientsRead, MaskRead, MergedRead, Read, ValueRead
from gact_fx.passes.standardize import resolve, standardize
from gact_fx.plan import TensorPlan
from gact_fx.records import SavedTensor, Standardization


@dataclass(frozen=True)
class Encoding(ABC):
    """How the saved tensor ``name`` is stored, and the ``reason`` where that needs one.

    ``label`` names the encoding in reports.
    """

    name: str
    reason: str

    label: ClassVar[str]

    @abstractmethod
    def nbytes(self, tensor: SavedTensor, entry: TensorPlan | None) -> int | None:
        """Bytes of what is stored in the tensor's place; None where the tensor itself is held."""

    def bits(self, entry: TensorPlan | None) -> float | None:
        """Mean width of what is stored of an element, None where it is exact in its own dtype."""
        return None

    def write(self, value: SavedValue, entry: TensorPlan | None, forward: ForwardEditor) -> tuple[Read, ...]:
        """Have forward save ``value`` so; returns what backward reads."""
        return ()


@dataclass(frozen=True)
class Keep(Encoding):
    """The tensor as it is."""

    label = "keep"

    def nbytes(self, tensor: SavedTensor, entry: TensorPlan | None) -> int | None:
        return None


@dataclass(frozen=True)
class Copy(Keep):
    """A copy of the tensor, its dimensions in their ``order``: the memory that it lies in is much larger."""

    order: tuple[int, ...]

    def nbytes(self, tensor: SavedTensor, entry: TensorPlan | None) -> int:
        return tensor.nbytes

    def write(self, value: SavedValue, entry: TensorPlan | None, forward: ForwardEditor) -> tuple[Read, ...]:
        forward.save(value, forward.copied(value.source, self.order))
        return ()


@dataclass(frozen=True)
class Drop(Encoding):
    """Nothing: backward does not read it. An empty tensor takes the slot, since positions must not change."""

    label = "drop"

    def nbytes(self, tensor: SavedTensor, entry: TensorPlan | None) -> int:
        return 0

    def write(self, value: SavedValue, entry: TensorPlan | None, forward: ForwardEditor) -> tuple[Read, ...]:
        forward.drop(value.name)
        return ()


@dataclass(frozen=True)
class Alias(Encoding):
    """The blob of ``of`` serves: both lie in one storage, of which ``of`` is the whole."""

    of: str
    label = "alias"

    def nbytes(self, tensor: SavedTensor, entry: TensorPlan | None) -> int:
        return 0


@dataclass(frozen=True)
class Pack(Encoding):
    """Integers of ``width`` bits, exact.

    ``order`` lists the dimensions from the slowest to the fastest in memory. With a ``modulus`` the integers index
    something of that size, where i and i - modulus are the same.
    """

    order: tuple[int, ...]
    width: int
    modulus: int | None = None
    label = "pack"

    def nbytes(self, tensor: SavedTensor, entry: TensorPlan | None) -> int:
        return integers_nbytes(tensor.numel, self.width)

    def bits(self, entry: TensorPlan | None) -> int:
        return self.width

    def write(self, value: SavedValue, entry: TensorPlan | None, forward: ForwardEditor) -> tuple[Read, ...]:
        code = Code(self.width)
        integers = forward.in_order(value.source, self.order)
        if self.modulus is not None:
            integers = forward.add(torch.ops.aten.remainder.Scalar, (integers, self.modulus), f"{value.name}_positive")
        forward.save(value, forward.compress(integers, code, value.name))
        return (ValueRead(value, self.order, code),)


@dataclass(frozen=True)
class Mask(Encoding):
    """One bit an element, exact: a boolean tensor itself, or where there are ``masks``, what backward compares of it.

    ``masks`` names the backward nodes with these comparisons, of ``mask_numel`` elements in all.
    """

    order: tuple[int, ...]
    masks: tuple[str, ...] = ()
    mask_numel: int = 0
    label = "mask"

    def nbytes(self, tensor: SavedTensor, entry: TensorPlan | None) -> int:
        return integers_nbytes(self.mask_numel or tensor.numel)

    def bits(self, entry: TensorPlan | None) -> int:
        return 1

    def write(self, value: SavedValue, entry: TensorPlan | None, forward: ForwardEditor) -> tuple[Read, ...]:
        mask = forward.packed_masks(self.name, self.masks, self.order) or forward.as_bytes(value.source, self.order)
        forward.save(value, forward.compress(mask, MASK_CODE, value.name))
        read = MaskRead(value, self.masks, self.order) if self.masks else ValueRead(value, self.order, MASK_CODE)
        return (read,)


@dataclass(frozen=True)
class Quantize(Encoding):
    """Codes of a width that the plan chooses.

    ``order`` lists the dimensions from the slowest to the fastest in memory. ``masks`` names the backward nodes whose
    exact boolean values, of ``mask_numel`` elements in all, travel in the blob; ``merges`` the one of these that the
    codes themselves can tell, if the plan says so. ``is_curved``: attention that is computed again bends in it.
    ``bends``: backward is not affine in it (``is_tame``: but has no poles; ``has_poles``: some lie among numbers of
    order one; ``unknown``: this operator may do anything), and in the ``coefficients``, which may be stored instead,
    it is. ``statistics`` are kept tensors, with their bytes, that backward reads for its sake, and that no other one
    pays for. ``exact_allowed``: the plan may keep it exact, since its masks then follow from it alone.
    ``values_allowed``: it may store codes of the values: no pole lies where other tensors' codes lead with these.
    """

    order: tuple[int, ...]
    masks: tuple[str, ...] = ()
    mask_numel: int = 0
    merges: str = ""
    standardization: Standardization | None = None
    min_bits: int = 1
    is_curved: bool = False
    bends: bool = False
    is_tame: bool = False
    has_poles: bool = False
    unknown: str = ""
    exact_allowed: bool = True
    values_allowed: bool = True
    coefficients: Coefficients | None = None
    statistics: tuple[tuple[str, int], ...] = ()
    label = "quantize"

    @property
    def merges_losslessly(self) -> bool:
        """Whether what the merged mask stops is 0."""
        return self.standardization is None

    def without_merged(self) -> "Quantize":
        """The same without the mask that is merged, by which nothing need be folded either."""
        by = self.standardization
        masks = tuple(mask for mask in self.masks if mask != self.merges)
        return replace(self, masks=masks, standardization=None if by is None else replace(by, sign=""))

    def other_ways(self) -> tuple[str, ...]:
        """What a plan may store beside "values" (`TensorPlan`)."""
        if self.coefficients is None:
            return ()
        # What decisions do that are taken again is measured where the tensor is exact.
        is_measured = self.coefficients.retakes and self.exact_allowed and self.values_allowed
        offered = {"bare": is_measured, "coefficients": bool(self.coefficients.nodes)}
        return tuple(way for way, is_offered in offered.items() if is_offered)

    def bare(self) -> "Quantize":
        """The same without the masks that backward can take from the values again."""
        assert self.coefficients is not None
        masks, by = self.coefficients.masks, self.standardization
        by = None if by is None else replace(by, sign=by.sign if by.sign in masks else "")
        return replace(self, masks=masks, mask_numel=self.coefficients.mask_numel, standardization=by)

    def keeping(self, names: Collection[str]) -> "Quantize":
        """The same, freeing none of these tensors."""
        if self.coefficients is None:
            return self
        frees = tuple(name for name in self.coefficients.frees if name not in names)
        return replace(self, coefficients=replace(self.coefficients, frees=frees))

    def freed(self, stored: str) -> frozenset[str]:
        """The kept tensors that nobody reads where the plan has ``stored`` this (`TensorPlan`)."""
        return frozenset(self.coefficients.frees if stored == "coefficients" and self.coefficients else ())

    def statistics_nbytes(self, stored: str) -> int:
        """Bytes of the ``statistics`` that are needed beside what is ``stored``."""
        freed = self.freed(stored)
        return sum(nbytes for name, nbytes in self.statistics if name not in freed)

    def admits(self, tensor: SavedTensor, entry: TensorPlan) -> bool:
        """Whether a decision made for another graph can be kept to for ``tensor``."""
        if entry.code is None:
            return self.exact_allowed
        values = ("values",) if self.values_allowed else ()
        if (entry.merged and not self.merges) or entry.stored not in (*values, *self.other_ways()):
            return False
        return entry.code.bits >= self.min_bits and (entry.code.bits != BFLOAT16_BITS or self.takes_bfloat16(tensor))

    def takes_bfloat16(self, tensor: SavedTensor) -> bool:
        """Whether what is stored has a dtype that bfloat16 is half of."""
        return tensor.dtype is not None and tensor.dtype.itemsize == 4

    def nbytes(self, tensor: SavedTensor, entry: TensorPlan | None) -> int | None:
        assert entry is not None and tensor.dtype is not None
        if entry.code is None:
            return None
        if entry.stored == "values":
            return entry.code.nbytes(tensor.numel, tensor.dtype, self.mask_numel - entry.merged * tensor.numel)
        assert self.coefficients is not None
        of = self.coefficients if entry.stored == "coefficients" else tensor
        assert of.dtype is not None
        return entry.code.nbytes(of.numel, of.dtype, self.coefficients.mask_numel)

    def bits(self, entry: TensorPlan | None) -> float | None:
        return entry.code.mean_bits if entry is not None and entry.code is not None else None

    def write(self, value: SavedValue, entry: TensorPlan | None, forward: ForwardEditor) -> tuple[Read, ...]:
        assert entry is not None
        if entry.code is None:
            return ()
        if entry.stored == "coefficients":
            return self._write_coefficients(value, entry.code, forward)
        if entry.stored == "bare":
            return self.bare()._write_codes(value, entry.code, False, forward)
        return self._write_codes(value, entry.code, entry.merged, forward)

    def _write_coefficients(self, value: SavedValue, code: Code, forward: ForwardEditor) -> tuple[Read, ...]:
        assert self.coefficients is not None
        mask = forward.packed_masks(self.name, self.coefficients.masks, self.order)
        nodes = tuple(forward.backward[name] for name in self.coefficients.nodes)
        like = tuple(node.meta["val"] for node in nodes)
        joined = forward.joined([forward.derive(node) for node in nodes])
        blob = forward.compress(joined, code, value.name, mask)
        for saved in (value, *forward.aliases.get(self.name, ())):
            forward.save(saved, blob)
        for name in self.coefficients.frees:
            forward.drop(name)
        return MaskRead(value, self.coefficients.masks, self.order), CoefficientsRead(value, nodes, like, code)

    def _write_codes(self, value: SavedValue, code: Code, is_merged: bool, forward: ForwardEditor) -> tuple[Read, ...]:
        how = self.without_merged() if is_merged else self
        merged = forward.backward[self.merges] if is_merged else None
        by = how.standardization
        mask = forward.packed_masks(self.name, how.masks, self.order)
        source = value.source
        if by is not None:
            operands = resolve(by, lambda name: forward.derive(forward.backward[name]))
            source = standardize(source, operands, forward.add)
        if merged is not None:
            source = mark_stopped(source, forward.derive(merged), forward.add)
        dense = forward.in_order(source, code.order_of(self.order))
        if by is not None or merged is not None:
            dense = forward.laid_out(dense, source)
        blob = forward.compress(dense, code, value.name, mask)
        aliases = tuple(forward.aliases.get(self.name, ()))
        for saved in (value, *aliases):
            forward.save(saved, blob)
        # Standardised values are made from the masks, which come before them.
        reads: list[Read] = [MaskRead(value, how.masks, self.order, None if by is None else value.placeholder)]
        if merged is not None:
            reads.append(MergedRead(value, merged, self.order, code))
        fill = None if merged is None else "zero" if self.merges_losslessly else "mean"
        return (*reads, ValueRead(value, code.order_of(self.order), code, by, fill, aliases))
