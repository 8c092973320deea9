"""gact_fx beside what people use to save activation memory: peak, bytes held, step time and gradient error.

    python benchmarks/peers.py [NETWORK ...] [--methods KEY ...] [--amp] [--small] [--times N|fill] [--turns 7]
                               [--without-time] [--without-error] [--resume] [--device cpu|cuda] [--plot [PNG]]

Networks are those of ``real_networks.py``, methods those of ``peers_methods.py``. Every method runs in a fresh process.
One that fails is a row that says why; the exit status is 1 if it was gact_fx. Results are saved after each row, beside
those of earlier runs on this machine; ``--resume`` measures only what is not there yet, so that times can be measured
on an idle machine (``--without-error``), memory and errors on a busy one (``--without-time``). ``--plot`` draws what
there is.

- peak: the most bytes that are live over a step, above the parameters: activations, gradients, transients.
- held: bytes that are live when backward begins.
- step: forward and backward; the median of turns that alternate with torch.compile's, and the median of their ratios.
- error: of one gradient, dropout off, against eager PyTorch's in the same precision, as a share of its norm.

``--times fill`` (on a GPU) makes the batch as many times larger as eager PyTorch's step has room for.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from machine import describe, results_path, save, saved
from peers_methods import METHODS, known
from peers_plot import draw
from peers_process import Case, Failure, Process, Surroundings, parse_times, times_that_fill

NETWORKS = ("bert", "resnet50", "gpt2", "unet")
REFERENCE = "compile"
Row = dict[str, Any]


class Reference:
    """torch.compile's step, in a process that lives as long as one network is measured; started when it is needed."""

    def __init__(self, case: Case, around: Surroundings, stack: ExitStack) -> None:
        self._case, self._around, self._stack = replace(case, method=REFERENCE), around, stack
        self._process: Process | None = None
        self._failed = ""

    def seconds(self) -> float | None:
        """Seconds of a step; None where torch.compile fails."""
        if self._failed:
            return None
        try:
            if self._process is None:
                self._process = self._stack.enter_context(Process(self._case, self._around))
                self._process.ask("memory")
            return self._process.ask("step")["seconds"]
        except Failure as failure:
            self._failed = str(failure)
            print(f"torch.compile, which times are compared with, fails: {failure}", flush=True)
            return None


def step_seconds(process: Process, reference: Reference, turns: int) -> Row:
    """Both take turns, and change places from turn to turn; the first turn warms up."""
    pairs: list[tuple[float, float | None]] = []
    for turn in range(turns + 1):
        if turn % 2:
            seconds, other = process.ask("step")["seconds"], reference.seconds()
        else:
            other, seconds = reference.seconds(), process.ask("step")["seconds"]
        pairs.append((seconds, other))
    found: Row = {"seconds": statistics.median(seconds for seconds, _ in pairs[1:])}
    ratios = [seconds / other for seconds, other in pairs[1:] if other is not None]
    if ratios:
        found["ratio"] = statistics.median(ratios)
        found["ratio_range"] = [min(ratios), max(ratios)]
    return found


def measure(case: Case, reference: Reference, options: argparse.Namespace, around: Surroundings, begun: Row) -> Row:
    """One row: ``begun``, and what it lacks. What was measured before a failure stays in it."""
    row: Row = {"label": METHODS[case.method].label, "times": case.times, **begun}
    lacking = lacks(row, options)
    try:
        if lacking & {"peak", "seconds"}:
            with Process(case, around) as process:
                row.update(process.ask("memory"))  # which also takes the steps that compile
                if "seconds" in lacking:
                    row.update(step_seconds(process, reference, options.turns))
                    row["threads"], row["load"] = torch.get_num_threads(), round(os.getloadavg()[0], 2)
        if "error" in lacking:
            with Process(case, around) as process:
                row.update(process.ask("error"))
    except Failure as failure:
        row["failed"] = str(failure)
    return row


def run_network(
    case: Case, options: argparse.Namespace, rows: dict[str, Row], around: Surroundings, stop_at: float
) -> Iterator[str]:
    """Measure the methods asked for into ``rows``; gives each one's key when its row is there."""
    if time.monotonic() > stop_at:
        return
    if options.times == "fill":
        case = replace(case, times=times_that_fill(case, around))
    with ExitStack() as stack:
        reference = Reference(case, around, stack)
        for key in known(options.methods):
            begun = taken_up(rows.get(key), case.times) if options.resume else {}
            if not lacks(begun, options):
                continue
            if time.monotonic() > stop_at:
                print(f"{case.network}: time is up; --resume measures the other methods", flush=True)
                return
            rows[key] = measure(replace(case, method=key), reference, options, around, begun)
            yield key


def taken_up(row: Row | None, times: int) -> Row:
    """What a resumed run keeps of a row: nothing of one that failed or had another batch."""
    return {} if row is None or "failed" in row or row["times"] != times else row


def lacks(row: Row, options: argparse.Namespace) -> set[str]:
    """What the options ask for and ``row`` has not."""
    wanted = {"peak": True, "seconds": options.time, "error": options.error}
    return {key for key, asked in wanted.items() if asked and key not in row}


def describe_row(network: str, row: Row) -> str:
    cells = [
        f"{row[key] / 1e6:8.1f}" if key in row else f"{'-':>8}" for key in ("peak", "held")
    ] + [
        f"{row['seconds']:8.3f}" if "seconds" in row else f"{'-':>8}",
        f"{row['ratio']:6.2f}" if "ratio" in row else f"{'-':>6}",
        f"{row['error']:9.1e}" if "error" in row else f"{'-':>9}",
    ]  # fmt: skip
    failed = f"  {row['failed']}" if "failed" in row else ""
    return f"{network:9} {row['label']:31} {' '.join(cells)}{failed}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(NETWORKS)}; default: all")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="KEY")
    parser.add_argument("--amp", action="store_true", help="under bfloat16 autocast")
    parser.add_argument("--small", action="store_true", help="small networks, for a quick run")
    parser.add_argument(
        "--times", type=parse_times, default="1", help='a batch of so many times the rows; "fill" fills a GPU'
    )
    parser.add_argument("--turns", type=int, default=7, help="timed steps of each method")
    parser.add_argument("--without-time", dest="time", action="store_false", help="leave the step times alone")
    parser.add_argument("--without-error", dest="error", action="store_false", help="leave the gradients alone")
    parser.add_argument("--resume", action="store_true", help="measure only what was not measured yet, or failed")
    parser.add_argument("--limit", type=float, default=1800, help="seconds that a process may take for one answer")
    parser.add_argument("--seconds", type=float, help="begin no row after so many seconds; --resume does the others")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", nargs="?", const="", metavar="PNG", help="draw what was measured so far, and end")
    options = parser.parse_intermixed_args()
    options.networks = options.networks or list(NETWORKS)
    if options.times == "fill" and options.device != "cuda":
        parser.error("--times fill fills a GPU; on the CPU give a number")
    if unknown := sorted(set(options.networks) - set(NETWORKS)):
        parser.error(f"no network is called {unknown[0]!r}; there are {', '.join(NETWORKS)}")
    return options


def main() -> None:
    options = parse_options()
    name = f"peers-{'bf16' if options.amp else 'fp32'}{'-small' * options.small}"
    name += {"1": "", "fill": "-fill"}.get(options.times, f"-{options.times}x")
    if options.plot is not None:
        path = Path(options.plot or results_path(name).with_suffix(".png"))
        try:
            precision = "bf16 autocast" if options.amp else "fp32"
            found = {key: rows for key in NETWORKS if (rows := saved(name).get(key))}
            draw(found, path, describe(), f"small networks, {precision}" if options.small else precision)
        except RuntimeError as error:
            sys.exit(f"peers.py: {error}; results are read from {results_path(name).name}")
        print(f"figure: {path}")
        return
    precision = "bf16 autocast" if options.amp else "fp32"
    print(f"a training step, {precision}, {torch.get_num_threads()} threads; {describe()}")
    print(f"{'network':9} {'method':31} {'peak MB':>8} {'held MB':>8} {'seconds':>8} {'ratio':>6} {'error':>9}")
    times = 1 if options.times == "fill" else int(options.times)
    results = saved(name)
    log_path = results_path(name).with_suffix(".log")
    log_path.parent.mkdir(parents=True, exist_ok=True)
    ours_failed = False
    stop_at = time.monotonic() + (options.seconds or math.inf)
    with open(log_path, "a") as log, tempfile.TemporaryDirectory() as folder:
        around = Surroundings(folder, log, options.limit)
        for network in options.networks:
            case = Case(network, REFERENCE, options.amp, options.small, times, options.device)
            rows = dict(results.get(network, {}))
            for key in run_network(case, options, rows, around, stop_at):
                results[network] = {each: rows[each] for each in known(list(rows))}
                save(name, results)
                print(describe_row(network, rows[key]), flush=True)
                ours_failed |= key.startswith("gact-") and "failed" in rows[key]
    if ours_failed:
        sys.exit(f"peers.py: gact_fx failed in a row above; {log_path.name} has the traceback")


if __name__ == "__main__":
    main()
