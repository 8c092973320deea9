"""The report behind ``gact_fx.inspect``: every saved tensor, how it is stored, and why not smaller."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import fx, nn

from gact_fx.diagnostics.collect import collect
from gact_fx.diagnostics.cures import warnings
from gact_fx.diagnostics.full_table import full_table
from gact_fx.diagnostics.html import frame, page
from gact_fx.diagnostics.logits import Logits
from gact_fx.diagnostics.memory_timeline import Timeline
from gact_fx.diagnostics.report_rows import Row, average_bits
from gact_fx.diagnostics.steps import StepSizes
from gact_fx.diagnostics.summary import summary
from gact_fx.errors import MissingPackageError, UsageError
from gact_fx.graphs.step_memory import StepMemory
from gact_fx.passes.pipeline import Stage
from gact_fx.plan import Plan
from gact_fx.training.model import session_of
from gact_fx.training.ranks import unwrapped
from gact_fx.training.session import Session


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
    """What was rewritten. ``print(report)`` is a summary, ``report.table()`` has every tensor.

    Attributes:
        rows: every saved tensor of the training step that held most, or before the first one, as the plan predicts it.
        graphs: the graphs that this step ran; behind them, those that only the last step ran.
        plan: what the graphs were rewritten by (None before there is one), to be saved and passed to
            ``gact_fx.compile(plan=...)``.
        note: which state the model is in, '' where it trains by its plan.
        steps: what the largest training step held for backward, and the last one where that is another; before the
            first one, what is predicted.
        warnings: what is not as it should be, each with the cure.
        peak_measured: bytes that the latest step under :func:`gact_fx.measure_peak` had live at its peak, gradients
            included; None where none was measured by this plan.
        logits: what the logits of heads cost that are computed some classes at a time.
    """

    rows: tuple[Row, ...]
    graphs: tuple[GraphReport, ...]
    plan: Plan | None
    note: str
    steps: tuple[StepSizes, ...] = ()
    warnings: tuple[str, ...] = ()
    peak_measured: int | None = None
    logits: Logits = field(default_factory=Logits)
    # What is live in the course of a step.
    _timeline: Timeline = field(default_factory=Timeline, repr=False, compare=False)

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
    def peak_activations(self) -> int | None:
        """The most bytes of activations that are live at a time in the largest step, as predicted.

        What forward keeps counts, as it is stored, and what operators make and free again. Parameters, gradients, the
        batch and the optimizer's state do not, nor does what forward returns once it has returned, nor most of what
        libraries take inside of an operator. Sizes are those that the graphs were traced with. None before there is a
        plan.
        """
        return self._of(self._timeline.after, "activations")

    @property
    def peak_before(self) -> int | None:
        """`peak_activations` without compression; None before a step ran by the plan."""
        return self._of(self._timeline.before, "activations")

    @property
    def peak_predicted(self) -> int | None:
        """The most bytes that are live at a time, the gradients that the step makes included, as predicted.

        That is ``peak`` of :func:`gact_fx.estimate`, and what `peak_measured` measures.
        """
        return self._of(self._timeline.after, "peak")

    @property
    def gradients(self) -> int | None:
        """Bytes of the gradients that the step leaves."""
        return self._of(self._timeline.after, "gradients")

    @staticmethod
    def _of(step: StepMemory, name: str) -> int | None:
        return getattr(step, name) if step.length else None

    @property
    def average_bits(self) -> float | None:
        """Bits per element over the tensors with codes, their metadata and masks included."""
        return average_bits(self.rows)

    @property
    def stages(self) -> Stages:
        """The passes that made the graphs, as they ran."""
        return Stages(graph.stages for graph in self.graphs)

    def to_json(self) -> str:
        """Rows and totals as JSON."""
        totals = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after, "ratio": self.ratio}
        peaks = ("peak_activations", "peak_before", "peak_predicted", "peak_measured", "gradients")
        totals |= {name: getattr(self, name) for name in peaks}
        lists = {
            "warnings": self.warnings,
            "logits": asdict(self.logits),
            "steps": list(map(asdict, self.steps)),
            "rows": list(map(asdict, self.rows)),
        }
        return json.dumps({"note": self.note, **totals, "average_bits": self.average_bits, **lists}, indent=1)

    def to_dataframe(self) -> Any:
        """The rows as a ``pandas.DataFrame``, a column for each field of :class:`Row`.

        Raises:
            MissingPackageError: pandas is not installed; the extra "report" brings it.
        """
        try:
            import pandas
        except ImportError as error:
            raise MissingPackageError(
                "gact_fx: report.to_dataframe() needs pandas, which is not installed; pip install 'gact_fx[report]'"
            ) from error
        return pandas.DataFrame([asdict(row) for row in self.rows], columns=[f.name for f in fields(Row)])

    def table(self) -> str:
        """Every tensor that takes memory, a line each, for wide terminals."""
        return full_table(self)

    def save(self, path: str | Path) -> None:
        """Write the report as one HTML file that needs no network: charts, every tensor, the graphs after each pass.

        Raises:
            UsageError: ``path`` does not end with ".html" or ".htm".
        """
        if Path(path).suffix.lower() not in (".html", ".htm"):
            raise UsageError(
                f"gact_fx: report.save writes HTML, and {str(path)!r} does not end with .html; "
                "report.to_json() and report.plan.save(path) give the rest"
            )
        Path(path).write_text(page(self, self._timeline), encoding="utf-8")

    def _repr_html_(self) -> str:
        """What a notebook shows: the page without the graphs, in a frame of its own."""
        return frame(page(self, self._timeline, with_graphs=False))

    def __str__(self) -> str:
        return summary(self)

    @classmethod
    def from_session(cls, session: Session, model: object = None) -> "Report":
        """The report on the graphs that the session has compiled; in ``model`` is the module that was compiled."""
        name, compiled = _compiled(model, session)
        modules = () if compiled is None else unwrapped(compiled).named_modules()
        found = collect(session, {id(module): path for path, module in modules})
        reports = tuple(GraphReport(g.pair.forward, g.pair.backward, g.stages) for g in found.graphs)
        cures = warnings(found.rows, session.plan, found.unforeseen)
        note = "; ".join(filter(None, (_covered(model, name, compiled), found.note)))
        logits = Logits.of(graph.forward for graph in reports)
        peak, timeline = session.run_counts.peak, found.timeline
        return cls(found.rows, reports, session.plan, note, found.steps, cures, peak, logits, timeline)


def _compiled(model: object, session: Session) -> tuple[str, nn.Module | None]:
    """The module in ``model`` that was compiled, whatever is around it, and its name there; of a function none."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    found = [(name, module) for name, module in modules if session_of(module) is session]
    # Wrappers hand on what they are asked for, and come first.
    return found[-1] if found else ("", None)


def _covered(model: object, name: str, compiled: nn.Module | None) -> str:
    """What to say of a model with more in it than what was compiled, '' of one without."""
    if not name or compiled is None or not isinstance(model, nn.Module):
        return ""
    within = {id(x) for x in (*compiled.modules(), *compiled.parameters())}
    # What is around it, as wrappers are, holds it and perhaps parameters.
    others = [module for path, module in model.named_modules() if path and not f"{name}.".startswith(f"{path}.")]
    if all(id(x) in within for x in (*others, *model.parameters())):
        return ""
    return f"this covers {name}, which was compiled; other modules of this {type(model).__name__} are not compressed"
