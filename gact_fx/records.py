"""The records that flow between passes: what is saved, and what was decided about it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from gact_fx.codec.code import Code
from gact_fx.codec.layout import rounding_of
from gact_fx.patterns import Places, shares_by_width


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
    (not a tensor at all). ``boundary`` is set for activations that other graphs may hold as well,
    ``replaced_nbytes`` where the tensor stands for a narrower one, of so many bytes, that would be held uncompressed.
    ``row_numel`` is the number of elements of one row of the batch, where rows lie one behind the other in memory and
    all graphs of this kind have as many; None where they do not, or that is not known.
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
    replaced_nbytes: int | None = None
    row_numel: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return 0 if self.dtype is None else self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Standardization:
    """What is done to values before they are coded, and undone after: ``(x - mean) * rstd``, turned over where a mask
    is false.

    ``mean`` and ``rstd`` name saved tensors with a number for every channel (dimension 1), ``sign`` names a mask that
    is stored with the tensor; nothing is turned over where it is ''.
    """

    mean: str
    rstd: str
    sign: str


@dataclass(frozen=True)
class Sensitivity:
    """What rounding one saved tensor does to the gradient, in units of squared gradient.

    ``value`` is GACT's c_l: the variance that stochastic rounding at 4 bits in groups of 256 adds, over S(4).
    ``variances`` has what each code (seed 0) adds, ``merged`` the same for codes that tell a mask as well (empty where
    they cannot, or nothing is known of what they would do to the elements that it stops); infinite where something
    would not be finite. ``squared_biases`` has the part of it that is bias, where backward bends; ``others``
    has, by their names, what other ways of storing it would add there. ``reason`` says why no code will do, where that
    is known. ``coherent_biases`` has the part of the bias that adds up over the rows of a batch, as measured.
    ``places`` has, by group size, what the groups of a row count for: the squared range times the weight of the
    elements. It is empty where that was not measured.
    """

    value: float
    variances: Mapping[Code, float]
    merged: Mapping[Code, float] = field(default_factory=dict)
    squared_biases: Mapping[Code, float] = field(default_factory=dict)
    others: "Mapping[str, Sensitivity]" = field(default_factory=dict)
    reason: str = ""
    coherent_biases: Mapping[Code, float] = field(default_factory=dict)
    places: Mapping[int, Places] = field(default_factory=dict)

    def variance(self, code: Code, *, merged: bool = False) -> float | None:
        """What ``code`` adds, whatever its seed; None where that was not measured.

        Rounding to nearest is for debugging, and counts as if it were stochastic.
        """
        if code.by_place:
            places = self.places.get(code.group_size)
            shares = None if places is None else shares_by_width(places, code.by_place)
            return None if shares is None else self.variance_by_width(code, shares)
        return (self.merged if merged else self.variances).get(_measured(code))

    def variance_by_width(self, code: Code, shares: Mapping[int, float]) -> float | None:
        """What codes like ``code`` add, of several widths, each for a share of what equal ones would add."""
        added = [(share, self.variance(replace(code, bits=bits, by_place=""))) for bits, share in shares.items()]
        known = [share * variance for share, variance in added if variance is not None]
        return math.fsum(known) if len(known) == len(added) else None

    def squared_bias(self, code: Code) -> float:
        """What of the variance of ``code`` is bias."""
        return self.squared_biases.get(_measured(code), 0.0)

    def scaled(self, factor: float) -> "Sensitivity":
        """So many times as much."""
        variances, merged, biases, coherent = (
            {code: factor * v for code, v in found.items()}
            for found in (self.variances, self.merged, self.squared_biases, self.coherent_biases)
        )
        others = {way: s.scaled(factor) for way, s in self.others.items()}
        return Sensitivity(factor * self.value, variances, merged, biases, others, self.reason, coherent, self.places)

    def of_whole_batch(self, weight: float) -> "Sensitivity":
        """What was measured on a few rows, for the batch that has ``weight`` times their variance.

        Errors of rows are independent, but biases that point one way are as many times larger as there are more rows.
        """
        more = max(weight, 1 / weight) - 1
        # Nothing times what is infinite would not be a number.
        variances, biases = (
            {code: v + more * self.coherent_biases.get(code, 0.0) if v < math.inf else v for code, v in found.items()}
            for found in (self.variances, self.squared_biases)
        )
        others = {way: s.of_whole_batch(weight) for way, s in self.others.items()}
        whole = replace(self, variances=variances, squared_biases=biases, others={}, coherent_biases={}).scaled(weight)
        return replace(whole, others=others)

    def exceeding(self, factor: float) -> "Sensitivity":
        """So many times as much for codes of the values; what backward is linear in is as it was measured."""

        def times(found: Mapping[Code, float]) -> dict[Code, float]:
            return {code: factor * v if factor < math.inf else factor for code, v in found.items()}

        if factor == 1:
            return self
        others = {way: s if way == "coefficients" else s.exceeding(factor) for way, s in self.others.items()}
        value = factor * self.value if factor < math.inf else factor
        return Sensitivity(
            value, times(self.variances), times(self.merged), times(self.squared_biases), others, self.reason,
            places=self.places,
        )  # fmt: skip

    @classmethod
    def mean(cls, several: "Sequence[Sensitivity]") -> "Sensitivity":
        """The mean over sample batches."""
        count = len(several)
        others = [name for name in several[0].others if all(name in s.others for s in several)]
        # Of few rows, or short ones, some codes are not measured.
        variances = [code for code in several[0].variances if all(code in s.variances for s in several)]
        merged = [code for code in several[0].merged if all(code in s.merged for s in several)]
        return cls(
            sum(s.value for s in several) / count,
            {code: sum(s.variances[code] for s in several) / count for code in variances},
            {code: sum(s.merged[code] for s in several) / count for code in merged},
            {code: sum(s.squared_bias(code) for s in several) / count for code in several[0].squared_biases},
            {name: cls.mean([s.others[name] for s in several]) for name in others},
            next((s.reason for s in several if s.reason), ""),
            places=_rows_of_all([s.places for s in several]),
        )


def _rows_of_all(several: Sequence[Mapping[int, Places]]) -> dict[int, Places]:
    """The rows of all batches, which must have equal lengths."""
    counts = [{size: places.count for size, places in of_batch.items()} for of_batch in several]
    if any(count != counts[0] for count in counts):
        return {}
    return {
        size: replace(places, rows=tuple(row for of_batch in several for row in of_batch[size].rows))
        for size, places in several[0].items()
    }


def _measured(code: Code) -> Code:
    rounding = rounding_of(code.rounding, code.bits)
    rounding = "stochastic" if rounding == "nearest" else rounding
    return Code(code.bits, rounding, code.group_size, per_channel=code.per_channel)
