"""The largest batch that fits a limit of memory, first steps included: gact_fx beside what people use.

    python benchmarks/largest_batch.py [NETWORK ...] [--methods KEY ...] [--memory GB] [--amp] [--small]
                                       [--resume] [--device cpu|cuda] [--plot [PNG]]

Networks are those of ``real_networks.py``, methods those of ``peers_methods.py``; every measurement is a fresh process.
The limit is of live memory above the parameters: activations, gradients, transients. The peak of every step, until
nothing compiles any more, is measured at one batch, at one twice as large, and on from there until it is half the
limit: which moment of a step has the peak may change with the rows. The largest batch is the one at which the line
through a step's last two peaks meets the limit, that of the worst step. ``--memory`` is in GB of 1e9 bytes. ``--plot``
draws what there is.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from machine import describe, results_path, save, saved
from peers_methods import METHODS, known
from peers_plot import COLORS
from peers_process import Case, Failure, Process, Surroundings
from real_networks import DEEP, NAMES

NETWORKS = ("bert-12", "resnet50", "gpt2-12")
TITLES = {
    "bert-12": "BERT-base, 256 tokens", "resnet50": "ResNet-50, 224 x 224 pixels", "gpt2-12": "GPT-2, 512 tokens",
}  # fmt: skip
USUAL = ("eager", "compile", "checkpoint-eager", "checkpoint", "budget-0.5", "budget-0", "gact-4", "gact-2")
# Batches that are measured of one method; those beyond two have a share of the rows that there is room for by the line
# so far, and at most so many times those of the batch before.
MOST_MEASURED, SHARE, MOST_TIMES = 6, 0.6, 4
Row = dict[str, Any]


def peaks(case: Case, around: Surroundings) -> dict[str, float]:
    """Bytes at the peak of each of the first steps, and the rows of a batch."""
    with Process(case, around) as process:
        return process.ask("peaks")


def measure(case: Case, around: Surroundings, limit: float) -> Row:
    """One row: what was measured at two batches, and at larger ones until the peak is half of ``limit`` bytes.

    Where a larger batch fails, it says why, and the line goes through those before.
    """
    row: Row = {"label": METHODS[case.method].label}
    found: list[dict[str, float]] = []
    try:
        for times in (1, 2):
            found.append(peaks(replace(case, times=times), around))
        while worst(found[-1]) < limit / 2 and len(found) < MOST_MEASURED:
            first, last = found[0]["rows"], found[-1]["rows"]
            rows = MOST_TIMES * last
            # Where no step takes more memory yet, a larger batch tells.
            with contextlib.suppress(ValueError):
                rows = min(SHARE * largest_batch(found, limit), rows)
            if rows <= last:
                break
            found.append(peaks(replace(case, times=math.ceil(rows / first)), around))
    except Failure as failure:
        row["failed"] = str(failure)
    if len(found) > 1:
        row["measured"] = found
    return row


def worst(measured: dict[str, float]) -> float:
    """The bytes of the step with the highest peak."""
    return max(value for key, value in measured.items() if key != "rows")


def largest_batch(measured: list[dict[str, float]], limit: float) -> int:
    """The most rows with which the peak of no step is above ``limit``, in bytes, by the two largest batches measured.

    Raises:
        ValueError: no step takes more memory with more rows.
    """
    few, many = measured[-2:]
    found = math.inf
    for step in few.keys() - {"rows"}:
        slope = (many[step] - few[step]) / (many["rows"] - few["rows"])
        if slope > 0:
            found = min(found, few["rows"] + (limit - few[step]) / slope)
    if math.isinf(found):
        raise ValueError(f"more rows take no more memory: {measured}")
    return max(math.floor(found), 0)


def describe_row(network: str, row: Row, rows: dict[str, Row], limit: float) -> str:
    if "measured" not in row:
        return f"{network:9} {row['label']:31} {row['failed']}"
    size = largest_batch(row["measured"], limit)
    failed = f"; with more rows: {row['failed']}" if "failed" in row else ""
    last = row["measured"][-1]
    plain = rows.get("compile", {}).get("measured")
    times = f"{size / max(largest_batch(plain, limit), 1):9.1f}x" if plain else ""
    return f"{network:9} {row['label']:31} {worst(last) / 1e6:9.1f} {last['rows']:9.0f} {size:8} {times}{failed}"


def draw(results: dict[str, dict[str, Row]], path: Path, limit: float, machine: str, how: str) -> None:
    """Write the PNG: a panel for each network, a bar for each method.

    Raises RuntimeError where matplotlib is missing or nothing was measured.
    """
    if not results:
        raise RuntimeError("nothing was measured yet: there is nothing to draw")
    if importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("the figure needs matplotlib: pip install matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(results), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(results), squeeze=False).flat
    for axes, (network, rows) in zip(panels, results.items(), strict=True):
        shown = {key: row for key, row in rows.items() if "measured" in row}
        sizes = [largest_batch(row["measured"], limit) for row in shown.values()]
        colors = [COLORS[METHODS[key].family] for key in shown]
        bars = axes.barh([row["label"] for row in shown.values()], sizes, color=colors)
        axes.bar_label(bars, padding=3, fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max([*sizes, 1]))
        axes.set_title(TITLES.get(network, network), fontsize=11, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("rows of the largest batch")
    figure.suptitle(f"What fits {limit / 1e9:g} GB above the parameters, {how}", fontsize=13)
    figure.supxlabel(machine, fontsize=8.5, color="#666666")
    figure.savefig(path, dpi=120)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"default: {', '.join(NETWORKS)}")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(USUAL), metavar="KEY")
    parser.add_argument("--memory", type=float, default=4.0, metavar="GB", help="the limit, in GB; default: 4")
    parser.add_argument("--amp", action="store_true", help="under bfloat16 autocast")
    parser.add_argument("--small", action="store_true", help="small networks, for a quick run")
    parser.add_argument("--resume", action="store_true", help="measure only what was not measured yet, or failed")
    parser.add_argument("--limit", type=float, default=1800, help="seconds that a process may take for one answer")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", nargs="?", const="", metavar="PNG", help="draw what was measured so far, and end")
    options = parser.parse_intermixed_args()
    options.networks = options.networks or list(NETWORKS)
    if unknown := sorted(set(options.networks) - {*NAMES, *DEEP}):
        parser.error(f"no network is called {unknown[0]!r}; there are {', '.join((*NAMES, *DEEP))}")
    return options


def main() -> None:
    options = parse_options()
    limit = options.memory * 1e9
    precision = "bf16 autocast" if options.amp else "fp32"
    name = f"largest-batch-{'bf16' if options.amp else 'fp32'}{'-small' * options.small}"
    results = saved(name)
    if options.plot is not None:
        path = Path(options.plot or results_path(name).with_suffix(".png"))
        try:
            draw(results, path, limit, describe(), f"small networks, {precision}" if options.small else precision)
        except RuntimeError as error:
            sys.exit(f"largest_batch.py: {error}; results are read from {results_path(name).name}")
        print(f"figure: {path}")
        return
    print(f"the largest batch within {options.memory:g} GB above the parameters, {precision}; {describe()}")
    print(f"{'network':9} {'method':31} {'MB':>9} {'with rows':>9} {'largest':>8} {'torch.compile':>14}")
    log_path = results_path(name).with_suffix(".log")
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with open(log_path, "a") as log, tempfile.TemporaryDirectory() as folder:
        around = Surroundings(folder, log, options.limit)
        for network in options.networks:
            rows = dict(results.get(network, {}))
            for key in known(options.methods):
                if not (options.resume and "measured" in rows.get(key, {})):
                    rows[key] = measure(
                        Case(network, key, options.amp, options.small, device=options.device), around, limit
                    )
                    results[network] = {each: rows[each] for each in known(list(rows))}
                    save(name, results)
                print(describe_row(network, rows[key], rows, limit), flush=True)


if __name__ == "__main__":
    main()
