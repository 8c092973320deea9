"""What the examples share: training runs side by side, as a table and as a figure."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from torch import Tensor, nn

import gact_fx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from activation_bytes import activation_bytes


@dataclass(frozen=True)
class RunResult:
    """One training run. ``score`` is what the run is judged by, as text; ``value`` the same as a number. ``losses`` and
    ``step_seconds`` go by step; ``report`` is None where uncompressed.
    """

    model: str
    run: str
    value: float
    score: str
    held_bytes: int
    losses: list[float]
    step_seconds: list[float]
    report: gact_fx.Report | None


def held_bytes(loss: Tensor, model: nn.Module, batch: list[Tensor]) -> int:
    """What autograd holds between forward and backward, parameters, buffers and the batch excluded."""
    return int(activation_bytes(loss, exclude=[*model.parameters(), *model.buffers(), *batch]))


def run_name(compressed: bool, budget_bits: float) -> str:
    return f"gact_fx, {budget_bits:g} bits" if compressed else "torch.compile"


def table(results: list[RunResult], score: str) -> str:
    """One line a run; the ratio is to the bytes of the same model in torch.compile."""
    plain = {result.model: result.held_bytes for result in results if result.report is None}
    lines = [("model", "run", score, "bytes held for backward", "ratio", "median step time")]
    for r in results:
        ratio = f"{plain[r.model] / r.held_bytes:.1f}x"
        step = f"{1e3 * statistics.median(r.step_seconds):.1f} ms"
        lines.append((r.model, r.run, r.score, f"{r.held_bytes / 1e6:.2f} MB", ratio, step))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = ([*map(str.ljust, line[:2], widths[:2]), *map(str.rjust, line[2:], widths[2:])] for line in lines)
    return "\n".join("  ".join(line) for line in cells)


def draw(results: list[RunResult], score: str, path: str) -> None:
    """A row of panels a model: loss curves, and for every tensor its sensitivity and its bits."""
    models = list(dict.fromkeys(result.model for result in results))
    figure = Figure(figsize=(15, 7.5 * len(models)), layout="constrained")
    grid = figure.subplots(len(models), 3, squeeze=False, width_ratios=[1.5, 1, 1])
    for (loss_axes, sensitivity_axes, bits_axes), model in zip(grid, models, strict=True):
        for result in (r for r in results if r.model == model):
            loss_axes.plot(smooth(result.losses), label=f"{result.run} ({score} {result.score})")
            if result.report is not None:
                draw_bits(sensitivity_axes, bits_axes, result.report)
        loss_axes.set(title=f"{model}: training loss", xlabel="step", yscale="log")
        loss_axes.set_ylabel("cross-entropy, mean of the last 25 steps")
        loss_axes.legend()
        loss_axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def draw_bits(sensitivity_axes: Axes, bits_axes: Axes, report: gact_fx.Report) -> None:
    """Two panels side by side with one line a saved tensor, the first that forward makes at the top."""
    rows = [r for r in report.rows if r.encoding in ("quantize", "keep") and r.sensitivity is not None]
    places = range(len(rows))
    labels = [f"{r.name}  {'x'.join(map(str, r.shape))}" for r in rows]
    sensitivity_axes.plot([r.sensitivity or 0.0 for r in rows], places, "o", color="tab:red", markersize=4)
    sensitivity_axes.set(xscale="log", title="sensitivity of the gradient to rounding")
    sensitivity_axes.set_xlabel("squared change of the gradient at 1 bit")
    sensitivity_axes.xaxis.set_minor_formatter(NullFormatter())
    sensitivity_axes.set_yticks(places, labels, fontsize=7)
    sensitivity_axes.set_ylabel("saved tensor and its shape, in the order of the graph")
    bits_axes.barh(places, [r.bits or 0 for r in rows], color="tab:blue")
    for place, row in zip(places, rows, strict=True):
        text = f" {row.bits}" if row.bits is not None else " kept exact"
        bits_axes.text(row.bits or 0, place, text, va="center", fontsize=7)
    bits_axes.set(title="bits it is stored in", xlabel="bits per element (32 uncompressed)", xlim=(0, 9))
    bits_axes.set_yticks(places, [])
    for axes in (sensitivity_axes, bits_axes):
        axes.set_ylim(len(rows) - 0.5, -0.5)  # the first at the top
        axes.grid(alpha=0.3, axis="both" if axes is sensitivity_axes else "x")


def smooth(values: list[float], window: int = 25) -> list[float]:
    """Running mean over the last ``window`` values."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
