"""The charts of a report: memory in the course of a step, bits beside sensitivity, noise beside bytes."""

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from gact_fx.codec.layout import BFLOAT16_BITS
from gact_fx.diagnostics.charts import COLOURS, Axis, Point, area_chart, scatter
from gact_fx.diagnostics.memory_timeline import Timeline
from gact_fx.diagnostics.modules import OTHERS, OUTSIDE, Path, blocks, fold, label
from gact_fx.diagnostics.noise import share_text
from gact_fx.diagnostics.report_rows import Row, noise_shares
from gact_fx.graphs.step_memory import Buffer, StepMemory
from gact_fx.training.progress import size

# How many modules have a colour of their own, and how many moments of a step are drawn.
MOST_GROUPS = 7
MOST_MOMENTS = 400


def timeline_charts(timeline: Timeline) -> str:
    """Two charts on one scale, before and after, with their peaks; '' where nothing is known."""
    kinds = (("before", timeline.before), ("after", timeline.after))
    if not all(step.length for _, step in kinds):
        return ""
    lines = _groups([b for _, step in kinds for b in step.buffers if not b.is_gradient])
    order = list(dict.fromkeys(lines.values()))
    names = [label(".".join(line) or OTHERS, blocks(line, [p for p in lines if lines[p] == line])) for line in order]
    charts = []
    levels = [[_levels(step, lines, line) for line in order] for _, step in kinds]
    totals = [[sum(values) for values in zip(*series, strict=True)] for series in levels]
    highest = max(map(max, totals))
    for (kind, step), series, total in zip(kinds, levels, totals, strict=True):
        moments = _moments(total)
        peak = f"{kind}: at most {size(round(max(total)))} at a time"
        drawing = area_chart(
            [[values[i] / 1e6 for i in moments] for values in series],
            1.12 * highest / 1e6,
            Axis("operators of one step, as they run"),
            Axis("MB"),
            division=step.forward / step.length,
            label=f"memory over a step, {peak}",
        )
        charts.append(f"<figure><figcaption>{escape(peak)}</figcaption>{drawing}</figure>")
    return f'<div class="charts">{"".join(charts)}</div>{_legend(names)}'


def scatter_charts(rows: Sequence[Row]) -> str:
    """Bits beside sensitivity, and noise beside bytes, of all tensors with codes."""
    shares = noise_shares(rows)
    coded = [(row, share) for row, share in zip(rows, shares, strict=True) if row.bits is not None]
    by_sensitivity = [
        Point(row.sensitivity / row.numel, _height(row.bits or 0), _text(row, share))
        for row, share in coded
        if row.sensitivity is not None
    ]
    by_bytes = [Point(row.bytes_after, share, _text(row, share), 5) for row, share in coded if share is not None]
    bits = [*((float(b), str(b)) for b in range(1, 9)), (_height(BFLOAT16_BITS), "16")]
    nbytes = [(10.0**power, size(10**power)) for power in range(2, 13)]
    percent = [(10.0**power, f"{100 * 10.0**power:g} %") for power in range(-16, 1)]
    charts = {
        "bits beside sensitivity per element": scatter(
            by_sensitivity,
            Axis("sensitivity per element", is_log=True),
            Axis("bits", marks=tuple(bits)),
            label="bits beside sensitivity",
        ),
        "noise beside bytes": scatter(
            by_bytes,
            Axis("bytes held for backward", is_log=True, marks=tuple(nbytes)),
            Axis("share of the noise", is_log=True, marks=tuple(percent)),
            label="noise beside bytes",
        ),
    }
    figures = [f"<figure><figcaption>{name}</figcaption>{svg}</figure>" for name, svg in charts.items() if svg]
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def _height(bits: float) -> float:
    """Where a width stands on its axis: bfloat16 right above the widest code."""
    return 9.5 if bits == BFLOAT16_BITS else float(bits)


def _text(row: Row, share: float | None) -> str:
    about = f"{row.bits:.3g} bits, {size(row.bytes_before)} before, {size(row.bytes_after)} after"
    noise = f", {share_text(share)} of the noise" if share is not None else ""
    return f"{row.module or OUTSIDE}: {row.name} ({row.op}): {about}{noise}"


def _groups(buffers: Sequence[Buffer]) -> dict[Path, Path]:
    weights: dict[Path, int] = {}
    for buffer in buffers:
        weights[_path(buffer)] = weights.get(_path(buffer), 0) + buffer.nbytes
    return fold(weights, MOST_GROUPS)


def _path(buffer: Buffer) -> Path:
    return tuple(buffer.module.split(".")) if buffer.module else (OUTSIDE,)


def _levels(step: StepMemory, lines: dict[Path, Path], line: Path) -> list[int]:
    """The bytes of the modules of one line that are live at each operator, gradients left out."""
    buffers = tuple(b for b in step.buffers if not b.is_gradient and lines[_path(b)] == line)
    return replace(step, buffers=buffers).levels()


def _moments(total: Sequence[int]) -> list[int]:
    """Of every short stretch the moment when most is live."""
    stretch = max(1, -(-len(total) // MOST_MOMENTS))
    return [
        max(range(start, min(start + stretch, len(total))), key=total.__getitem__)
        for start in range(0, len(total), stretch)
    ]


def _legend(names: Sequence[str]) -> str:
    entries = (
        f'<span><i style="background:{COLOURS[i % len(COLOURS)]}"></i>{escape(name)}</span>'
        for i, name in enumerate(names)
    )
    return f'<p class="legend">{"".join(entries)}</p>'
