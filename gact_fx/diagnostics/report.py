"""The report behind ``gact_fx.inspect``: every saved tensor, how it is stored, and why not smaller."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from gact_fx.breaks.forward_pass import EagerTensor
from gact_fx.breaks.graph_holdings import Holding
from gact_fx.codec.operators import has_compiled_kernels
from gact_fx.diagnostics.report_table import Row, table_lines
from gact_fx.passes.encodings import Keep, Mask, Quantize, is_counted
from gact_fx.passes.pipeline import Stage
from gact_fx.plan import Plan, TensorPlan
from gact_fx.training.rewrite import RewrittenGraph

if TYPE_CHECKING:
    from gact_fx.training.session import Session

_SHARED = "stored once, with others that hold the same activation"
_MOVED = "moved to host memory"


@dataclass(frozen=True)
class GraphReport:
    """One pair of rewritten graphs (``forward.print_readable()`` shows one) and the passes that made it."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Report:
    """What was rewritten. ``plan`` is what it was rewritten by (None before there is one), to be saved and passed to
    ``gact_fx.compile(plan=...)``; ``note`` says what state the model is in.
    """

    rows: tuple[Row, ...]
    graphs: tuple[GraphReport, ...]
    plan: Plan | None
    note: str

    @property
    def bytes_before(self) -> int:
        """Bytes that the same graphs hold for backward without compression, parameters and inputs excluded."""
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """Bytes that the rewritten graphs hold."""
        return sum(row.bytes_after for row in self.rows)

    @property
    def ratio(self) -> float:
        """``bytes_before / bytes_after``; 1 where nothing is held."""
        return self.bytes_before / self.bytes_after if self.bytes_after else 1.0

    @property
    def average_bits(self) -> float | None:
        """Bits per element over the tensors with codes, their metadata and masks included."""
        rows = [row for row in self.rows if row.encoding == Quantize.label]
        elements = sum(row.copies * row.numel for row in rows)
        return 8 * sum(row.bytes_after for row in rows) / elements if elements else None

    def to_json(self) -> str:
        """Rows and totals as JSON."""
        totals = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after, "ratio": self.ratio}
        rows = [asdict(row) for row in self.rows]
        return json.dumps({"note": self.note, **totals, "average_bits": self.average_bits, "rows": rows}, indent=1)

    def __str__(self) -> str:
        return "\n".join(table_lines(self.rows, self.note, self.average_bits))

    @classmethod
    def from_session(cls, session: Session) -> Report:
        """The report on the graphs that the session has compiled and training still runs."""
        records = [record for record in session.graphs if session.run_counts.is_current(record)]
        runs = [session.run_counts.runs(record) for record in records]
        regions = session.eager_regions
        first = regions.shares_of_runs if regions is not None else {}
        rows = tuple(row for i, record in enumerate(records) for row in _rows(i, record, runs[i], first))
        if regions is not None:
            rows += tuple(_eager_row(i, tensor) for i, tensor in enumerate(regions.latest_planned))
        graphs = tuple(GraphReport(r.pair.forward, r.pair.backward, r.stages) for r in records)
        return cls(rows, graphs, session.plan, _note(session))


def _note(session: Session) -> str:
    if session.config.budget_bits is None:
        return "compression is off (budget_bits=None)"
    if session.plan is None:
        return (
            "no plan yet: run one training step, which is the sample (if you have, torch.compile captured no graph, or "
            "compiled autograd ran backward; that needs sample_batches)"
        )
    if not session.graphs:
        return "a plan, and no graph compiled with it yet; run a training step"
    if all(row.encoding == Keep.label for record in session.graphs for row in _rows(0, record, 1)):
        return "nothing to compress: the reasons are in the table"
    if session.run_counts.backward_is_unseen:
        return (
            "no backward pass of these graphs was seen (compiled autograd runs them itself): bytes are those of one "
            "run of each graph"
        )
    slow = sorted({device for record in session.graphs for device in _devices(record)} - _compiled_devices())
    if slow:
        how = "fused by Inductor" if session.config.inner == "inductor" and session.config.fuse != "off" else "unfused"
        return (
            f"no compiled operators for {', '.join(slow)}: PyTorch code serves, {how}, with the same results; "
            "cpu and cuda have them where gact_fx was built with a C++ compiler, or nvcc, without GACT_FX_NO_EXT"
        )
    return ""


def _devices(record: RewrittenGraph) -> set[str]:
    values = [value.source.meta["val"] for value in record.replayable.saved_values()]
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}


def _compiled_devices() -> set[str]:
    return {device for device in ("cpu", "cuda") if has_compiled_kernels(device)}


def _rows(
    index: int, graph: RewrittenGraph, runs: int, first: Mapping[Holding, tuple[float, float]] | None = None
) -> Iterator[Row]:
    """``first``: in which share of the runs a slot was the first to hold an activation, and what is stored of it."""
    held: set[int] = set()
    kept: set[int] = set()
    entries = graph.plan.entries()
    for tensor, how in graph.analysis.pairs():
        entry = entries.get(tensor.key) if isinstance(how, Quantize) else None
        code = entry.code if entry is not None else None
        before = after = 0
        if is_counted(tensor) and tensor.storage not in held:
            held.add(tensor.storage)
            before = tensor.storage_nbytes
        stored = how.nbytes(tensor, entry)
        if stored is not None:
            after = stored
        elif is_counted(tensor) and tensor.storage not in kept:
            kept.add(tensor.storage)
            after = tensor.storage_nbytes
        share_before, share_after = (first or {}).get((graph, tensor.name), (1.0, 1.0))
        reasons = ["the planner found it worth its bytes" if entry is not None and code is None else how.reason]
        if after and share_after == 0:
            reasons.append(_SHARED)
        if tensor.name in graph.swapped:
            reasons.append(_MOVED)
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
            encoding=Keep.label if entry is not None and code is None else how.label,
            bits=how.bits(entry),
            rounding=code.rounding if code is not None else None,
            group_size=code.group_size if code is not None else None,
            sensitivity=entry.sensitivity if entry is not None else None,
            bytes_before=round(runs * share_before) * before,
            bytes_after=round(runs * share_after) * after,
            copies=round(runs * share_after),
            reason=reason,
        )


def _use_of_mask(how: Quantize, entry: TensorPlan) -> str:
    if entry.merged:
        return "its mask merged into the codes"
    return "folded by its mask" if how.standardization is not None and how.standardization.sign else ""


def _eager_row(index: int, tensor: EagerTensor) -> Row:
    use = str(tensor.use) if tensor.use is not None else ""
    code = None if tensor.is_mask else tensor.code
    reason = "saved by eager PyTorch"
    if tensor.code is None:
        reason += (
            f", where {use} is not known to bear rounding" if use else " for what is not among the model's results"
        )
    return Row(
        graph=None,
        runs=1,
        name=f"eager_{index}",
        module="",
        op=use,
        shape=tensor.shape,
        dtype=str(tensor.dtype).removeprefix("torch."),
        encoding=(Keep if tensor.code is None else Mask if tensor.is_mask else Quantize).label,
        bits=tensor.code.bits if tensor.code is not None else None,
        rounding=code.rounding if code is not None else None,
        group_size=code.group_size if code is not None else None,
        sensitivity=None,
        bytes_before=tensor.bytes_before,
        bytes_after=tensor.bytes_after,
        copies=int(tensor.bytes_after > 0),
        reason=reason,
    )
