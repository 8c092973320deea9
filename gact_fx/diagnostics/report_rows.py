"""The rows of a report: every saved tensor, how it is stored, and why not smaller."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gact_fx.breaks.forward_pass import EagerTensor
from gact_fx.breaks.graph_holdings import Holding
from gact_fx.passes.encodings import Drop, Keep, Mask, Quantize
from gact_fx.passes.graph_analysis import freed, is_counted
from gact_fx.plan import TensorPlan
from gact_fx.records import SavedTensor
from gact_fx.training.rewrite import RewrittenGraph


@dataclass(frozen=True, kw_only=True)
class Row:
    """One saved tensor, of the compiled graph ``graph``, or of eager PyTorch between graphs where that is None.

    Bytes are those held between forward and backward, each storage counted once, by all ``runs`` of the graph in a
    step; a tensor that is held anyway (a parameter, a graph input) counts 0. They count wherever they lie: where
    ``reason`` ends with "moved to host memory" (``swap=True``), not on the device. ``bits``, ``rounding`` and
    ``group_size`` are the code, None where kept exact. ``copies`` are stored in a step: ``runs``, but for shared ones.
    """

    graph: int | None = None
    runs: int = 1
    name: str
    module: str = ""
    op: str
    shape: tuple[int, ...]
    dtype: str
    encoding: str
    bits: int | None
    rounding: str | None
    group_size: int | None
    sensitivity: float | None = None
    bytes_before: int
    bytes_after: int
    copies: int
    reason: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def graph_rows(
    index: int, graph: RewrittenGraph, runs: int, first: Mapping[Holding, tuple[float, float]] | None = None
) -> Iterator[Row]:
    """``first``: in which share of the runs a slot was the first to hold an activation, and what is stored of it."""
    held: set[int] = set()
    kept: set[int] = set()
    entries = graph.plan.entries()
    unread = freed(graph.analysis, entries)
    for tensor, how in graph.analysis.pairs():
        entry = entries.get(tensor.key) if isinstance(how, Quantize) else None
        code = entry.code if entry is not None else None
        is_exact = entry is not None and code is None
        if tensor.name in unread:
            how = Drop(tensor.name, "backward reads what was made of it")
        before, after = _first(tensor, held), how.nbytes(tensor, entry)
        if after is None:
            after = _first(tensor, kept)
        share_before, share_after = (first or {}).get((graph, tensor.name), (1.0, 1.0))
        exact = entry.reason if entry is not None and entry.reason else "the planner found it worth its bytes"
        reasons = [exact if is_exact else how.reason]
        if code is not None and entry is not None and entry.stored == "coefficients":
            reasons.append("stored as what backward makes of it")
        if after and share_after == 0:
            reasons.append("stored once, with others that hold the same activation")
        if tensor.name in graph.swapped:
            reasons.append("moved to host memory")
        if entry is not None and entry.excess > 1:
            reasons.append(f"its codes and others' together do {entry.excess:.2g} times what was predicted")
        reason = ", ".join(filter(None, reasons))
        if isinstance(how, Quantize) and entry is not None and code is not None and how.masks:
            reason = "; ".join(filter(None, (reason, _use_of_mask(how, entry))))
        yield Row(
            graph=index,
            runs=runs,
            name=tensor.name,
            module=tensor.module,
            op=tensor.op,
            shape=tensor.shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            encoding=Keep.label if is_exact else how.label,
            bits=how.bits(entry),
            rounding=code.rounding if code is not None else None,
            group_size=code.group_size if code is not None else None,
            sensitivity=entry.sensitivity if entry is not None else None,
            bytes_before=round(runs * share_before) * before,
            bytes_after=round(runs * share_after) * after,
            copies=round(runs * share_after),
            reason=reason,
        )


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
    why = f", where {use} is not known to bear rounding" if use else " for what is not among the model's results"
    return Row(
        name=f"eager_{index}",
        op=use,
        shape=tensor.shape,
        dtype=str(tensor.dtype).removeprefix("torch."),
        encoding=(Keep if tensor.code is None else Mask if tensor.is_mask else Quantize).label,
        bits=tensor.code.bits if tensor.code is not None else None,
        rounding=code.rounding if code is not None else None,
        group_size=code.group_size if code is not None else None,
        bytes_before=tensor.bytes_before,
        bytes_after=tensor.bytes_after,
        copies=int(tensor.bytes_after > 0),
        reason="saved by eager PyTorch" + (why if tensor.code is None else ""),
    )
