"""Draw the figure of `kernels.py` from its JSON: ratio to a copy by width, a panel for either direction.

python benchmarks/kernels_plot.py benchmarks/results/kernels-....json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

NBYTES = 64 << 20
WIDTHS = range(1, 9)
COLORS = {"float32": "#1f77b4", "bfloat16": "#d95f02", "float16": "#2a9d5c", "float64": "#7b5ea7"}


def draw(results: Path) -> Path:
    """Write the PNG beside the JSON."""
    saved = json.loads(results.read_text())
    found = saved["results"]
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots(1, 2)
    for panel, direction in zip(axes, ("compress", "decompress"), strict=True):
        rows = [
            row
            for row in found["rows"]
            if (row["section"], row["direction"], row["nbytes"]) == ("widths", direction, NBYTES)
            and row["bits"] in WIDTHS
        ]
        _panel(panel, rows, direction, found["copy"])
    top = max(panel.get_ylim()[1] for panel in axes)
    for panel in axes:
        panel.set_ylim(0, top)
    axes[0].set_ylabel(f"rate, {found['copy']} = 1\n({found['rate']} per second)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"gact_fx kernels, tensors of 64 MiB, groups of 256\n{saved['machine']}", fontsize=11)
    path = results.with_suffix(".png")
    figure.savefig(path, dpi=120)
    return path


def _panel(axes: Axes, rows: list[dict[str, Any]], direction: str, copy: str) -> None:
    axes.axhline(1, color="black", linewidth=1, linestyle="--")
    axes.annotate(copy.replace(" ", "\n"), (9.1, 1), xytext=(0, 3), textcoords="offset points", ha="right", fontsize=9)
    for dtype, color in COLORS.items():
        line = [row for row in rows if row["dtype"] == dtype and row["rounding"] == "stochastic"]
        dither = [row for row in rows if row["dtype"] == dtype and row["rounding"] == "dither"]
        axes.plot(*_points(line), marker="o", markersize=5, color=color, label=dtype)
        axes.plot(*_points(dither), marker="D", markersize=8, color=color, linestyle="none", markerfacecolor="none")
    axes.plot([], [], marker="o", color="gray", linestyle="none", label="stochastic")
    axes.plot([], [], marker="D", markersize=8, color="gray", linestyle="none", markerfacecolor="none", label="dither")
    axes.set_title(direction)
    axes.set_xlabel("bits per element")
    axes.set_xticks(WIDTHS)
    axes.set_xlim(0.7, 9.1)  # room for the label beside the last points
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _points(rows: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    return [row["bits"] for row in rows], [row["ratio_to_copy"]["median"] for row in rows]


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
