"""The rows of a report: every saved tensor, how it is stored, and why not smaller."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from gact_fx.breaks.forward_pass import EagerTensor
from gact_fx.codec.layout import SOURCE_DTYPES
from gact_fx.diagnostics.noise import added_variance
from gact_fx.passes.encodings import Drop, Encoding, Keep, Mask, Quantize
from gact_fx.passes.graph_analysis import GraphAnalysis, freed, is_counted
from gact_fx.plan import GraphPlan, TensorPlan
from gact_fx.records import SavedTensor, Sensitivity
from gact_fx.training.run_counts import GraphRuns


@dataclass(frozen=True, kw_only=True)
class Row:
    """One saved tensor, of the compiled graph ``graph``, or of eager PyTorch between graphs where that is None.

    Bytes are those held between forward and backward, each storage counted once, by all ``runs`` of the graph in a
    step; a tensor that is held anyway (a parameter, a graph input) counts 0. They count wherever they lie: where
    ``reason`` ends with "moved to host memory" (``swap=True``), not on the device. ``bits``, ``rounding`` and
    ``group_size`` are the code, None where kept exact. ``by_place`` are the widths of the groups of a row of the batch,
    such as "8x3 2x45", where these differ; ``bits`` is then their mean. ``per_channel`` is true where groups lie within
    channels, and None where there is no code. ``copies`` are stored in a step: ``runs``, but
    for shared ones. ``variance`` is what all of them add to the gradient's, in units of squared gradient, each measured
    alone; None where that is not known. ``module`` is '' outside of modules.
    """

    graph: int | None = None
    runs: int = 1
    name: str
    module: str = ""
    op: str
    shape: tuple[int, ...]
    dtype: str
    encoding: str
    bits: float | None
    rounding: str | None
    group_size: int | None
    sensitivity: float | None = None
    bytes_before: int
    bytes_after: int
    copies: int
    reason: str
    variance: float | None = None
    by_place: str = ""
    per_channel: bool | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def average_bits(rows: Iterable[Row]) -> float | None:
    """Bits per element over the tensors with codes, their metadata and masks included; None without any."""
    coded = [row for row in rows if row.encoding == Quantize.label]
    elements = sum(row.copies * row.numel for row in coded)
    return 8 * sum(row.bytes_after for row in coded) / elements if elements else None


@dataclass(frozen=True)
class Held:
    """What rows are made of: one graph by its plan, or by the plan that it is going to have.

    ``runs`` are those of the step that is reported; ``names`` has the full names of modules by what the analysis calls
    them, ``measured`` the sensitivities by key, ``swapped`` the slots whose blobs are moved to host memory. ``shares``
    says in which share of the runs a slot was the first to hold an activation, and what is stored of it.
    """

    analysis: GraphAnalysis
    plan: GraphPlan
    runs: GraphRuns
    names: Mapping[str, str] = field(default_factory=dict)
    measured: Mapping[str, Sensitivity] = field(default_factory=dict)
    swapped: frozenset[str] = frozenset()
    shares: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def graph_rows(index: int, held: Held) -> Iterator[Row]:
    """The rows of one graph."""
    before: set[int] = set()
    kept: set[int] = set()
    entries = held.plan.entries()
    unread = freed(held.analysis, entries)
    for tensor, how in held.analysis.pairs():
        entry = entries.get(tensor.key) if isinstance(how, Quantize) else None
        if tensor.name in unread:
            how = Drop(tensor.name, "not stored: backward reads what was computed from it, which is stored instead")
        size_before, size_after = _first(tensor, before), how.nbytes(tensor, entry)
        if size_before and tensor.replaced_nbytes is not None:
            size_before = tensor.replaced_nbytes
        if size_after is None:
            size_after = _first(tensor, kept)
        yield _row(index, held, tensor, how, entry, (size_before, size_after))


def _row(
    index: int, held: Held, tensor: SavedTensor, how: Encoding, entry: TensorPlan | None, sizes: tuple[int, int]
) -> Row:
    code = entry.code if entry is not None else None
    runs, scale = held.runs.runs, held.runs.scale
    shares = held.shares.get(tensor.name, (1.0, 1.0))
    before, after = (round(round(runs * share) * scale * size) for share, size in zip(shares, sizes, strict=True))
    copies = round(runs * shares[1])
    variance = added_variance(entry, held.measured.get(tensor.key)) if entry is not None else 0.0
    return Row(
        graph=index,
        runs=runs,
        name=tensor.name,
        module=held.names.get(tensor.module, tensor.module),
        op=tensor.op,
        shape=tensor.shape,
        dtype=str(tensor.dtype).removeprefix("torch."),
        encoding=Keep.label if entry is not None and code is None else how.label,
        bits=how.bits(entry),
        rounding=code.rounding if code is not None else None,
        group_size=code.group_size if code is not None else None,
        sensitivity=entry.sensitivity if entry is not None else None,
        bytes_before=before,
        bytes_after=after,
        copies=copies,
        reason=_reason(held, tensor, how, entry, is_shared=bool(sizes[1]) and shares[1] == 0),
        variance=None if variance is None else runs * variance,
        by_place=code.by_place if code is not None else "",
        per_channel=code.per_channel if code is not None else None,
    )


def _reason(held: Held, tensor: SavedTensor, how: Encoding, entry: TensorPlan | None, *, is_shared: bool) -> str:
    """Why a tensor is stored as it is, and what else there is to say of it."""
    if entry is None:
        reasons = [how.reason]
    elif entry.code is None:
        reasons = [entry.reason or "under this budget the planner keeps it exact"]
    else:
        reasons = [
            how.reason,
            "the factor that backward computes from it is stored in its place"
            if entry.stored == "coefficients"
            else "",
            entry.reason,
        ]
    if is_shared:
        reasons.append("another graph stores the same activation")
    if tensor.name in held.swapped:
        reasons.append("moved to host memory")
    if entry is not None and entry.excess > 1:
        reasons.append(f"together with other tensors' codes its noise is {entry.excess:.2g} times what was predicted")
    reason = ", ".join(filter(None, reasons))
    if isinstance(how, Quantize) and entry is not None and entry.code is not None and how.masks:
        reason = "; ".join(filter(None, (reason, _use_of_mask(how, entry))))
    return reason


def _first(tensor: SavedTensor, seen: set[int]) -> int:
    """The bytes of the tensor's storage where it counts and is not among those ``seen``; it is from now on."""
    if not is_counted(tensor) or tensor.storage in seen:
        return 0
    seen.add(tensor.storage)
    return tensor.storage_nbytes


def _use_of_mask(how: Quantize, entry: TensorPlan) -> str:
    if entry.merged:
        return "its mask merged into the codes"
    return "folded by its mask" if how.standardization is not None and how.standardization.sign else ""


def eager_row(index: int, tensor: EagerTensor) -> Row:
    use = str(tensor.use) if tensor.use is not None else ""
    code = None if tensor.is_mask else tensor.code
    dtype = str(tensor.dtype).removeprefix("torch.")
    if use:
        why = f"; gact_fx does not know whether {use} may read rounded values"
    elif tensor.dtype in (*SOURCE_DTYPES, torch.bool):
        why = ", in a computation that does not lead to the model's results"
    else:
        why = f"; gact_fx does not round {dtype}"
    return Row(
        name=f"eager_{index}",
        op=use,
        shape=tensor.shape,
        dtype=dtype,
        encoding=(Keep if tensor.code is None else Mask if tensor.is_mask else Quantize).label,
        bits=tensor.code.bits if tensor.code is not None else None,
        rounding=code.rounding if code is not None else None,
        group_size=code.group_size if code is not None else None,
        bytes_before=tensor.bytes_before,
        bytes_after=tensor.bytes_after,
        copies=int(tensor.bytes_after > 0),
        reason="saved by eager PyTorch" + (why if tensor.code is None else ""),
    )


def noise_shares(rows: Iterable[Row]) -> list[float | None]:
    """Of every row, its share of the variance that all codes add; None where that is not known."""
    variances = [row.variance for row in rows]
    total = math.fsum(v for v in variances if v is not None)
    return [v / total if v is not None and total > 0 else None for v in variances]
