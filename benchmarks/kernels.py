"""Speed of compress and decompress beside a plain copy: by width, dtype, size, group and layout, and fused by Inductor.

    python benchmarks/kernels.py [--quick] [--check] [--device cpu|cuda] [--default-malloc]

Every measurement comes right behind one of a copy of as many bytes: memcpy (``destination.copy_(source)``, all
threads), or the GPU's device-to-device copy. A ratio is the median over rounds of such neighbours' ratios. On the CPU
rates count the bytes of the uncompressed tensor; on the GPU all bytes read plus all written, in the copy too.

On the CPU the script starts itself anew with a malloc that keeps freed memory (glibc's MALLOC_* variables, see
`KEEP_FREED`). By default glibc gives freed blocks as large as these back to the kernel, and a new one costs page
faults, several times as long as filling it, in memcpy into a new tensor as in the operators. The copy here writes to
memory that was written before, so neither side's figures have any. ``--default-malloc`` leaves malloc as it is.

``--quick`` measures only what the checklist needs and saves nothing; otherwise JSON and PNG go to benchmarks/results.
``--check`` exits with status 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch
from kernels_meter import ROUNDS, Check, Codec, Meter, Row, short
from kernels_sections import (
    HUGE,
    LARGE,
    ROTATED,
    SMALL,
    measure_fusion,
    measure_groups,
    measure_patterns,
    measure_quickly,
    measure_reference,
    measure_strided,
    measure_widths,
)
from kernels_tables import by_group, by_size_and_way, by_way, print_checklist, print_section, size_name
from machine import describe, save

from gact_fx.ops import has_compiled_kernels

KEEP_FREED = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
Rows = dict[tuple[str, Codec, int], Row]  # by direction, codec and bytes
RATES = {"cpu": "bytes of the uncompressed tensor", "cuda": "bytes read + bytes written"}


# ---- Targets -----------------------------------------------------------------------------------------------------


def checklist(meter: Meter) -> list[Check]:
    rows = {(r.job.direction, r.job.codec, r.job.nbytes): r for r in meter.rows if r.job.section == "widths"}
    by_device = _cpu_checks(rows) if meter.device == "cpu" else _cuda_checks(rows)
    return by_device + _pattern_checks([row for row in meter.rows if row.job.section == "patterns"])


def _pattern_checks(rows: Sequence[Row]) -> list[Check]:
    plain = {row.job.direction: row for row in rows if not row.job.codec.by_place}
    return [
        Check(f"{row.job.direction}, {row.job.way}", row.rate_of(plain[row.job.direction]), 0.85, "x one width")
        for row in rows
        if row.job.codec.by_place
    ]


def _cpu_checks(rows: Rows) -> list[Check]:
    four = {direction: rows[direction, Codec(), LARGE] for direction in ("compress", "decompress")}
    checks = [
        Check(f"{direction}, fp32, 4 bits, 64 MiB", four[direction].ratio, target, "x memcpy")
        for direction, target in (("compress", 1.5), ("decompress", 1.2))
    ]
    for direction, row in four.items():
        for bits in (3, 5, 6, 7):
            rate = rows[direction, Codec(bits=bits), LARGE].rate_of(row)
            checks.append(Check(f"{direction}, {bits} bits", rate, 0.7, "x 4 bits"))
    for direction, row in four.items():
        rate = rows[direction, Codec(rounding="dither"), LARGE].rate_of(row)
        checks.append(Check(f"{direction}, dither", rate, 0.8, "x stochastic"))
    for direction, row in four.items():
        for bits in ROTATED:
            rate = rows[direction, Codec(bits=bits, rounding="rotated"), LARGE].rate_of(row)
            checks.append(Check(f"{direction}, rotated, {bits} bits", rate, 0.6, "x 4 bits"))
    for direction in four:
        seconds = rows[direction, Codec(), SMALL].median
        checks.append(Check(f"{direction}, fp32, 4 bits, 64 KiB", 1e6 * seconds, 15, "µs a call", at_least=False))
    return checks


def _cuda_checks(rows: Rows) -> list[Check]:
    checks = []
    for dtype in (torch.float32, torch.bfloat16):
        for nbytes in (LARGE, HUGE):
            for direction, target in (("compress", 0.80), ("decompress", 0.85)):
                row = rows[direction, Codec(dtype), nbytes]
                name = f"{direction}, {row.job.codec.dtype_name}, 4 bits, {size_name(nbytes)}"
                checks.append(Check(name, row.ratio, target, "x copy, read + written"))
    return checks


# ---- The run -----------------------------------------------------------------------------------------------------


def restart_with_kept_memory() -> None:
    """Run this script anew with `KEEP_FREED`, unless it runs so already. glibc reads it as a process starts."""
    if sys.platform == "linux" and any(os.environ.get(name) != value for name, value in KEEP_FREED.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **KEEP_FREED})


def print_header(meter: Meter, malloc: str) -> None:
    print(f"gact_fx kernels on {describe()}, {torch.get_num_threads()} threads")
    print(malloc)
    ratio = f"to the rate of {meter.copy_name} in the same run"
    print(f"GB/s: {RATES[meter.device]}; ratio: {ratio}; medians of {ROUNDS} rounds or fewer")
    if not has_compiled_kernels(meter.device):
        print(f"NOTE: no compiled kernels for {meter.device} here: this times the PyTorch implementation")


def run_sections(meter: Meter) -> None:
    measure_widths(meter)
    print_section(meter, "By dtype, width and size, groups of 256", "widths")
    measure_groups(meter)
    print_section(meter, "By group size, fp32, 4 bits, 64 MiB", "groups", by_group)
    measure_patterns(meter)
    print_section(meter, "Widths by place, fp32, 4 bits in the mean, 64 MiB", "patterns", by_way)
    measure_strided(meter)
    print_section(meter, "Sources that are not contiguous, fp32, 4 bits, 64 MiB", "strided", by_way)
    measure_reference(meter)
    print_section(meter, "Beside PyTorch code for the same bytes, fp32, 4 bits", "reference", by_size_and_way)
    measure_fusion(meter)
    title = "In a graph of Inductor, fp32, 4 bits: y = gelu(x) and y's blob; gradient * what is decompressed"
    print_section(meter, title, "fusion", by_size_and_way)


def copy_rates(meter: Meter) -> dict[str, float]:
    """The copy's GB/s by size, the median over everything that it was measured beside."""
    sizes = sorted({row.job.nbytes for row in meter.rows}, reverse=True)
    return {
        size_name(size): short(statistics.median(r.copy_gigabytes for r in meter.rows if r.job.nbytes == size))
        for size in sizes
    }


def save_results(meter: Meter, checks: Sequence[Check], name: str) -> None:
    """Write the JSON, and the figure where matplotlib is there."""
    results = {
        "device": meter.device,
        "threads": torch.get_num_threads(),
        "copy": meter.copy_name,
        "rate": RATES[meter.device],
        "page_faults_while_timing": meter.page_faults,
        "copy_gigabytes_per_second": copy_rates(meter),
        "checklist": [{**asdict(check), "measured": short(check.measured), "met": check.met} for check in checks],
        "rows": [row.to_json() for row in meter.rows],
    }
    path = save(name, results)
    print(f"saved {path}")
    if importlib.util.find_spec("matplotlib"):
        from kernels_plot import draw

        print(f"saved {draw(path)}")
    else:
        print("no matplotlib here: python benchmarks/kernels_plot.py draws the figure from the JSON")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--default-malloc", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that results are named by the CPU, not by a GPU beside it
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    malloc = "PyTorch's caching allocator"
    if device == "cpu" and options.default_malloc:
        malloc = "malloc as it is, page faults included"
    elif device == "cpu":
        restart_with_kept_memory()
        malloc = "malloc keeps freed memory (MALLOC_* variables), so that the figures count no page faults"
    started = time.perf_counter()
    torch.manual_seed(0)
    meter = Meter(device)
    print_header(meter, malloc)
    with torch.no_grad():
        if options.quick:
            measure_quickly(meter)
            print_section(meter, "What the targets are about", "widths")
            measure_patterns(meter)
            print_section(meter, "Widths by place, fp32, 4 bits in the mean, 64 MiB", "patterns", by_way)
        else:
            run_sections(meter)
    checks = checklist(meter)
    print_checklist(checks)
    rates = ", ".join(f"{rate:.1f} GB/s at {size}" for size, rate in copy_rates(meter).items())
    faults = f"; {meter.page_faults} page faults while timing" if device == "cpu" else ""
    print(f"\n{meter.copy_name}: {rates}{faults}")
    if not options.quick:
        save_results(meter, checks, "kernels-default-malloc" if options.default_malloc else "kernels")
    print(f"{time.perf_counter() - started:.0f} s")
    if options.check and not all(check.met for check in checks):
        sys.exit(1)


if __name__ == "__main__":
    main()
