"""The report behind ``gact_fx.inspect``: every saved tensor, how it is stored, and why not smaller."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import fx

from gact_fx.codec.layout import BFLOAT16_BITS
from gact_fx.codec.operators import has_compiled_kernels
from gact_fx.diagnostics.gradient_error import table
from gact_fx.diagnostics.report_rows import Row, eager_row, graph_rows
from gact_fx.passes.encodings import Keep, Quantize
from gact_fx.passes.pipeline import Stage
from gact_fx.plan import Plan
from gact_fx.training.progress import size
from gact_fx.training.rewrite import RewrittenGraph
from gact_fx.training.session import Session

_COLUMNS = (
    "graph", "tensor", "op", "shape", "dtype", "stored", "bits", "code", "sensitivity", "before", "after", "reason"
)  # fmt: skip
_RIGHT = ("graph", "bits", "sensitivity", "before", "after")

# A report that saves less than so many times names the largest tensors, so many at most.
LITTLE = 2.0
MOST_BLAMED = 3


class Stages(tuple[tuple[Stage, ...], ...]):
    """The pipeline as it ran, graph by graph; prints as a table."""

    def __str__(self) -> str:
        lines = [f"{'graph':>5}  {'pass':20} {'edits':18} {'ms':>8}"]
        for index, stages in enumerate(self):
            for stage in stages:
                edits = ", ".join(stage.edits)
                lines.append(f"{index:>5}  {stage.name:20} {edits:18} {1e3 * stage.seconds:8.1f}")
        return "\n".join(lines)


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

    @property
    def stages(self) -> Stages:
        """The passes that made the graphs, as they ran."""
        return Stages(graph.stages for graph in self.graphs)

    def to_json(self) -> str:
        """Rows and totals as JSON."""
        totals = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after, "ratio": self.ratio}
        rows = [asdict(row) for row in self.rows]
        return json.dumps({"note": self.note, **totals, "average_bits": self.average_bits, "rows": rows}, indent=1)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    @classmethod
    def from_session(cls, session: Session) -> "Report":
        """The report on the graphs that the session has compiled and training still runs."""
        graphs = [graph for graph in session.graphs if session.run_counts.is_current(graph)]
        runs = [session.run_counts.runs(graph) for graph in graphs]
        regions = session.eager_regions
        first = regions.shares_of_runs if regions is not None else {}
        rows = tuple(row for i, graph in enumerate(graphs) for row in graph_rows(i, graph, runs[i], first))
        if regions is not None:
            rows += tuple(eager_row(i, tensor) for i, tensor in enumerate(regions.latest_planned))
        reports = tuple(GraphReport(g.pair.forward, g.pair.backward, g.stages) for g in graphs)
        return cls(rows, reports, session.plan, _note(session))


def _note(session: Session) -> str:
    if session.config.budget_bits is None:
        return "compression is off (budget_bits=None)"
    if session.plan is None:
        return (
            "no plan yet: run one training step, which is the sample (if you have, torch.compile captured no graph, or "
            "compiled autograd ran backward; that needs sample_batches)"
        )
    if not session.graphs:
        predicted = session.predicted_sizes()
        by_plan = f" ({predicted})" if predicted else ""
        return f"a plan{by_plan}, and no graph compiled with it yet; run a training step"
    if all(row.encoding == Keep.label for graph in session.graphs for row in graph_rows(0, graph, 1)):
        return "nothing to compress: the reasons are in the table"
    if session.run_counts.backward_is_unseen:
        return (
            "no backward pass of these graphs was seen (compiled autograd runs them itself): bytes are those of one "
            "run of each graph"
        )
    devices = sorted({device for graph in session.graphs for device in _devices(graph)})
    slow = [device for device in devices if device not in ("cpu", "cuda") or not has_compiled_kernels(device)]
    if slow:
        how = "fused by Inductor" if session.config.inner == "inductor" and session.config.fuse != "off" else "unfused"
        return (
            f"no compiled operators for {', '.join(slow)}: PyTorch code serves, {how}, with the same results; "
            "cpu and cuda have them where gact_fx was built with a C++ compiler, or nvcc, without GACT_FX_NO_EXT"
        )
    return ""


def _devices(graph: RewrittenGraph) -> set[str]:
    values = [value.source.meta["val"] for value in graph.replayable.saved_values()]
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}


def _lines(report: Report) -> Iterator[str]:
    shown = [row for row in report.rows if row.bytes_before or row.bytes_after]
    if shown:
        yield from table([_COLUMNS, *(_cells(row) for row in shown)], _RIGHT)
    free = [row.reason for row in report.rows if not row.bytes_before and not row.bytes_after]
    if free:
        alike = "the same memory as another"
        counts = Counter(alike if reason.startswith("the same memory") else reason for reason in free)
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items())
        yield f"and {len(free)} saved values that cost nothing ({reasons})"
    if report.note:
        yield f"gact_fx: {report.note}"
    if shown:
        bits = f", {report.average_bits:.2f} bits per compressed element" if report.average_bits else ""
        sizes = f"{size(report.bytes_before)} before, {size(report.bytes_after)} after"
        yield f"held for backward: {sizes} ({report.ratio:.1f}x{bits})"
        if report.ratio < LITTLE and report.bytes_after:
            stored = [row for row in shown if row.bytes_after]
            largest = sorted(stored, key=lambda row: row.bytes_after, reverse=True)[:MOST_BLAMED]
            yield f"the largest: {', '.join(map(_blame, largest))}"


def _blame(row: Row) -> str:
    stored = f"{row.bits} bits" if row.bits is not None else row.reason or row.encoding
    return f"{row.name} ({', '.join(filter(None, (row.op, size(row.bytes_after), stored)))})"


def _cells(row: Row) -> tuple[str, ...]:
    sensitivity = f"{row.sensitivity:.2e}" if row.sensitivity is not None else ""
    bits = str(row.bits) if row.bits is not None else ""
    shape = "x".join(map(str, row.shape)) or "scalar"
    sizes = (size(row.bytes_before), size(row.bytes_after))
    # bfloat16 codes have neither rounding to speak of nor groups.
    code = f"{row.rounding} {row.group_size}" if row.rounding and row.bits != BFLOAT16_BITS else ""
    graph = "eager" if row.graph is None else str(row.graph) if row.runs == 1 else f"{row.graph} ({row.runs}x)"
    return (graph, row.name, row.op, shape, row.dtype, row.encoding, bits, code, sensitivity, *sizes, row.reason)
