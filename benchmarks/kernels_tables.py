"""The tables that `kernels.py` prints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from kernels_meter import Check, Meter, Row

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SMALL = 64 * KIB  # up to here microseconds a call are shown, not rates


def size_name(nbytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes // KIB} KiB"


def print_widths(rows: Sequence[Row]) -> None:
    """A line per codec; for every size the rates and ratios of both directions, for small ones microseconds."""
    sizes = sorted({row.job.nbytes for row in rows}, reverse=True)
    cells = {(row.job.codec, row.job.nbytes, row.job.direction): _cell(row) for row in rows}
    directions = ("compress", "decompress")
    print(" " * 25 + "".join(f" | {size_name(size):^{27 if size > SMALL else 21}}" for size in sizes))
    blocks = ["".join(f"{d:>{13 if size > SMALL else 10}} " for d in directions)[:-1] for size in sizes]
    print(" " * 25 + "".join(f" | {block}" for block in blocks))
    units = [f"{'GB/s':>6} {'ratio':>6}" if size > SMALL else f"{'µs':>10}" for size in sizes]
    print(f"{'dtype':9}{'bits':>4}  {'rounding':10}" + "".join(f" | {unit} {unit}" for unit in units))
    for codec in dict.fromkeys(row.job.codec for row in rows):
        line = f"{codec.dtype_name:9}{codec.bits:4}  {codec.rounding_name:10}"
        for size in sizes:
            empty = " " * (13 if size > SMALL else 10)
            line += " | " + " ".join(cells.get((codec, size, d), empty) for d in directions)
        print(line)


def _cell(row: Row) -> str:
    if row.job.nbytes <= SMALL:
        return f"{1e6 * row.median:10.1f}"
    return f"{row.gigabytes:6.1f} {row.ratio:5.2f}x"


def print_pairs(rows: Sequence[Row], label: Callable[[Row], str]) -> None:
    """A line per label, a block of columns per direction."""
    cells = {(label(row), row.job.direction): row for row in rows}
    directions = list(dict.fromkeys(row.job.direction for row in rows))
    width = max(len(line) for line, _ in cells)
    print(" " * width + "".join(f" | {direction:>24}" for direction in directions))
    print(" " * width + f" | {'ms':>9} {'GB/s':>7} {'ratio':>6}" * len(directions))
    for line in dict.fromkeys(line for line, _ in cells):
        found = [cells[line, direction] for direction in directions]
        blocks = [f" | {1e3 * row.median:9.3f} {row.gigabytes:7.2f} {row.ratio:5.2f}x" for row in found]
        print(f"{line:{width}}" + "".join(blocks))


def by_group(row: Row) -> str:
    return f"groups of {row.job.codec.group_size}"


def by_way(row: Row) -> str:
    return row.job.way


def by_size_and_way(row: Row) -> str:
    return f"{size_name(row.job.nbytes):>6}, {row.job.way}"


def print_section(meter: Meter, title: str, section: str, label: Callable[[Row], str] | None = None) -> None:
    """Print a section's rows, by what ``label`` makes of them; without it, as the table of widths."""
    rows = [row for row in meter.rows if row.job.section == section]
    print(f"\n{title}")
    if label is None:
        print_widths(rows)
    else:
        print_pairs(rows, label)
    sys.stdout.flush()


def print_checklist(checks: Sequence[Check]) -> None:
    print("\nTargets")
    for check in checks:
        sign = ">=" if check.at_least else "<"
        verdict = "ok" if check.met else "MISSED"
        print(f"{check.name:36} {check.measured:6.2f}   target {sign:>2} {check.target:5.2f} {check.unit:24} {verdict}")
