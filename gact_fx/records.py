"""The records that flow between passes: what is saved, and what was decided about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

# How a tensor's codes are made: bits, rounding, group size.
Code = tuple[int, str, int]

KEEP, QUANTIZE, MASK, PACK, ALIAS, DROP = "keep", "quantize", "mask", "pack", "alias", "drop"


@dataclass(frozen=True)
class Boundary:
    """In the memory of which of forward's inputs, or of what it returns to the caller, a saved tensor lies."""

    is_input: bool
    position: int


@dataclass(frozen=True)
class SavedTensor:
    """One value that forward saves for backward, as the partitioner left it.

    ``name`` is its slot in this graph; ``key`` (operator and occurrence, ``aten.addmm#2``) also finds it again where
    the same model is traced anew, with other node names because its shapes have become dynamic.
    ``shape`` and ``stride`` are in elements (hints where dynamic), ``nbytes`` counts the values alone, ``storage``
    numbers the storages of the graph, so that equal numbers share memory. ``owner`` says who else holds that memory:
    ``"nobody"``, ``"parameter"``, ``"caller"`` (a graph input), ``"output"`` (returned to the caller), or ``"symbol"``
    (not a tensor at all). ``boundary`` is set for activations that other graphs may hold as well.
    """

    name: str
    key: str
    op: str
    module: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype | None
    storage: int
    storage_nbytes: int
    owner: str
    dynamic: bool = False
    boundary: Boundary | None = None

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return 0 if self.dtype is None else self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Standardization:
    """What is done to values before they are coded, and undone after: ``(x - mean) * rstd``, turned over where a mask
    is false.

    ``mean`` and ``rstd`` name saved tensors with a number for every channel (dimension 1), ``sign`` names a mask that
    is stored with the tensor; '' leaves the step out (what is centred already has no ``mean``).
    """

    mean: str
    rstd: str
    sign: str


@dataclass(frozen=True)
class Eligibility:
    """How one saved tensor may be stored, and why not where it may not.

    ``encoding``: ``"quantize"`` (codes of some width), ``"mask"`` (1 bit, exact), ``"pack"`` (integers, exact, in
    ``min_bits`` bits), ``"alias"`` (the blob of ``alias_of`` serves), ``"drop"`` (backward does not read it) or
    ``"keep"``. ``masks`` names the backward nodes whose exact
    boolean values travel in the tensor's blob. ``order`` lists the dimensions from the slowest to the fastest in
    memory. ``instead`` names a backward node, as large as the tensor, that is stored in its place.
    ``merges`` names the one of ``masks`` that the codes themselves can tell, if the plan says so.
    ``min_bits`` is the least width at which its error stays in proportion. Integers are packed modulo ``modulus`` if
    there is one: they index something of that size, where i and i - modulus are the same.
    """

    name: str
    encoding: str
    reason: str
    masks: tuple[str, ...] = ()
    merges: str = ""
    mask_numel: int = 0
    order: tuple[int, ...] = ()
    alias_of: str = ""
    instead: str = ""
    standardization: Standardization | None = None
    min_bits: int = 1
    modulus: int | None = None
    # False where its masks travel in its blob.
    exact_allowed: bool = True
    # False where only the masks are read in backward, so that no value needs storing.
    values: bool = True

    @property
    def is_compressed(self) -> bool:
        return self.encoding != KEEP


@dataclass(frozen=True)
class GraphAnalysis:
    """What the analyses found in one pair of graphs: both tuples in the order of forward's outputs."""

    saved: tuple[SavedTensor, ...]
    eligibility: tuple[Eligibility, ...]

    def quantized(self) -> list[tuple[SavedTensor, Eligibility]]:
        """The tensors whose width is to be chosen."""
        return [
            (t, e) for t, e in zip(self.saved, self.eligibility, strict=True) if e.encoding == QUANTIZE and e.values
        ]


@dataclass(frozen=True)
class Sensitivity:
    """What rounding one saved tensor does to the gradient, in units of squared gradient.

    ``value`` is GACT's c_l: the variance that stochastic rounding at 4 bits in groups of 256 adds, over S(4).
    ``variances`` has the variance that each way of coding it adds, ``merged`` the same for codes that tell a mask as
    well (empty where they cannot, or nothing is known of what they would do to the elements that it stops).
    """

    value: float
    variances: Mapping[Code, float]
    merged: Mapping[Code, float] = field(default_factory=dict)

    @classmethod
    def mean(cls, several: Sequence[Sensitivity]) -> Sensitivity:
        """The mean over sample batches."""
        count = len(several)
        merged = [code for code in several[0].merged if all(code in s.merged for s in several)]
        return cls(
            sum(s.value for s in several) / count,
            {code: sum(s.variances[code] for s in several) / count for code in several[0].variances},
            {code: sum(s.merged[code] for s in several) / count for code in merged},
        )
