"""Draw the figure of `peers.py`: peak memory against step time, a panel for each network, methods named by points."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

TITLES = {
    "bert": "BERT-base, 6 layers, {rows} x 256 tokens",
    "resnet50": "ResNet-50, {rows} x 224 x 224",
    "gpt2": "GPT-2, 2 layers, vocabulary 50257, {rows} x 512 tokens",
    "unet": "UNet with attention, {rows} x 64 x 64",
}
ROWS = {"bert": 8, "resnet50": 8, "gpt2": 4, "unet": 4}
OURS, OURS_MORE = "gact_fx", "gact_fx-more"
COLORS = {
    "PyTorch": "#3b3b3b", "recompute": "#2f6db3", "offload": "#8a6d3b", "quantize": "#8e44ad", "hooks": "#c8742b",
    OURS: "#0b8457", OURS_MORE: "#0b8457",
}  # fmt: skip
SLOWEST = 3.0  # times torch.compile's step; what is slower is drawn at the edge, with its number
MARK = 5.0  # radius of a marker and its margin, in points
Rows = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Point:
    """One method: peak in MB or GB, step time in torch.compile's, and how it is drawn."""

    key: str
    label: str
    family: str
    x: float
    y: float

    @property
    def is_slow(self) -> bool:
        return self.y > SLOWEST

    @property
    def height(self) -> float:
        return min(self.y, SLOWEST)


def short_label(key: str, label: str, y: float) -> str:
    """What stands beside a point."""
    if key.startswith("gact-"):
        bits, _, more = key.removeprefix("gact-").partition("-")
        suffix = {"checkpoint": " + checkpointing", "recompute": ', recompute="full"'}.get(more, "")
        return f"gact_fx, {bits} bits{suffix}"
    return f"{label} ({y:.1f}x)" if y > SLOWEST else label


def points_of(rows: Rows, unit: float) -> list[Point]:
    """The methods that have both figures."""
    from peers_methods import METHODS

    return [
        Point(key, short_label(key, row["label"], row["ratio"]), METHODS[key].family, row["peak"] / unit, row["ratio"])
        for key, row in rows.items()
        if "peak" in row and "ratio" in row
    ]


def draw(results: dict[str, Rows], path: Path, machine: str, how: str) -> None:
    """Write the PNG; ``how`` names the precision.

    Raises RuntimeError where matplotlib is missing, or no method has both a peak and a time.
    """
    shown = {name: rows for name, rows in results.items() if any("ratio" in row for row in rows.values())}
    if not shown:
        raise RuntimeError("no method was measured beside torch.compile yet: there is nothing to draw")
    if importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("the figure needs matplotlib: pip install matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(shown), 2)
    lines = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(6.4 * columns, 4.4 * lines + 0.6), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    drawn = []
    for axes, (name, rows) in zip(panels, shown.items(), strict=False):
        drawn.append((axes, _panel(axes, name, rows, how)))
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    figure.suptitle(f"A training step's peak memory and time, {how}: lower left is better", fontsize=14)
    figure.supxlabel(machine, fontsize=8.5, color="#666666")
    # Labels find their places once the panels have theirs.
    canvas.draw()  # type: ignore[no-untyped-call]
    figure.set_layout_engine("none")
    for axes, points in drawn:
        place_labels(axes, points)
    figure.savefig(path, dpi=120)


def _panel(axes: Axes, name: str, rows: Rows, how: str) -> list[Point]:
    largest = max(row["peak"] for row in rows.values() if "peak" in row)
    unit, unit_name = (1e9, "GB") if largest > 4e9 else (1e6, "MB")
    points = points_of(rows, unit)
    line = [point for point in points if point.family == OURS]
    axes.plot([p.x for p in line], [p.height for p in line], color=COLORS[OURS], linewidth=2, zorder=2)
    for point in points:
        hollow = point.family == OURS_MORE
        color = COLORS[point.family]
        marker = "^" if point.is_slow else "o"
        face = "white" if hollow else color
        axes.plot(point.x, point.height, marker, markersize=7, color=color, markerfacecolor=face, zorder=3)
    gradients = max(row["gradients"] for row in rows.values() if "gradients" in row) / unit
    axes.axvspan(0, gradients, color="#efefef", zorder=0, linewidth=0)
    axes.set_xlim(0, 1.12 * max(p.x for p in points))
    low, high = min(p.height for p in points), max(p.height for p in points)
    margin = 0.14 * max(high - low, 0.2)
    axes.set_ylim(min(low, 1) - margin, high + margin)
    axes.axhline(1, color="#bbbbbb", linewidth=0.8, linestyle="--", zorder=1)
    axes.annotate("gradients", (0.01, 0.015), xycoords="axes fraction", fontsize=8, color="#888888")
    times = next(iter(rows.values()))["times"]
    title = f"{name}, small" if how.startswith("small") else TITLES[name].format(rows=ROWS[name] * times)
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(f"peak memory above the parameters, {unit_name}")
    axes.set_ylabel("step time, torch.compile = 1")
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    return points


# ---- Labels ------------------------------------------------------------------------------------------------------


def offsets() -> Iterator[tuple[float, float, str, str]]:
    """Places for a label around a point, nearest first: offset in points, and how the text is aligned."""
    for distance in (7, 14, 22, 32, 44):
        for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)):
            horizontal = {1: "left", 0: "center", -1: "right"}[dx]
            vertical = {1: "bottom", 0: "center", -1: "top"}[dy]
            yield dx * distance, dy * distance * 0.8, horizontal, vertical


def overlap(box: Bbox, others: Sequence[Bbox]) -> float:
    """Square pixels that ``box`` shares with the others."""
    from matplotlib.transforms import Bbox

    shared = [Bbox.intersection(box, other) for other in others]
    return float(sum(each.width * each.height for each in shared if each is not None))


def place_labels(axes: Axes, points: Sequence[Point]) -> None:
    """Write each label where it hides the least: no marker, no other label, nothing outside of the panel."""
    from matplotlib.transforms import Bbox

    scale = axes.figure.dpi / 72
    taken = []
    for point in points:
        x, y = axes.transData.transform((point.x, point.height))
        taken.append(Bbox.from_extents(x - MARK * scale, y - MARK * scale, x + MARK * scale, y + MARK * scale))
    panel = axes.get_window_extent()
    for point in sorted(points, key=lambda point: point.family != OURS):
        color, weight = COLORS[point.family], "bold" if point.family == OURS else "normal"
        text = axes.annotate(point.label, (point.x, point.height), xytext=(0, 0), textcoords="offset points",
                             fontsize=8.5, color=color, fontweight=weight, zorder=4)  # fmt: skip
        best: tuple[float, tuple[float, float, str, str], Bbox] | None = None
        for place in offsets():
            text.set(position=place[:2], ha=place[2], va=place[3])
            box = text.get_window_extent()
            outside = box.width * box.height - overlap(box, [panel])
            hidden = overlap(box, taken) + 3 * outside
            if best is None or hidden < best[0] - 1:
                best = hidden, place, box
            if hidden <= 1:
                break
        assert best is not None
        _, place, box = best
        text.set(position=place[:2], ha=place[2], va=place[3])
        taken.append(box)
        if max(abs(place[0]), abs(place[1])) > 14:
            axes.annotate("", (point.x, point.height), xytext=place[:2], textcoords="offset points",
                          arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkB": 4})  # fmt: skip
