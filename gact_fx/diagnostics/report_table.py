"""The rows of a report, and as text: a line for every saved tensor that costs something, and the sum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gact_fx.codec.layout import BFLOAT16_BITS

_COLUMNS = (
    "graph", "tensor", "op", "shape", "dtype", "stored", "bits", "code", "sensitivity", "before", "after", "reason"
)  # fmt: skip
_RIGHT = {"graph", "bits", "sensitivity", "before", "after"}


@dataclass(frozen=True)
class Row:
    """One saved tensor, of the compiled graph ``graph``, or of eager PyTorch between graphs where that is None.

    Bytes are those held between forward and backward, each storage counted once, by all ``runs`` of the graph in a
    step; a tensor that is held anyway (a parameter, a graph input) counts 0. They count wherever they
    lie: where ``reason`` ends with "moved to host memory" (``swap=True``), not on the device. ``bits`` is the width of
    a code, None where kept exact, ``rounding`` and ``group_size`` the rest of the code. ``copies`` counts what a step
    stores of it: ``runs`` of them, but for what others store.
    """

    graph: int | None
    runs: int
    name: str
    module: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    encoding: str
    bits: int | None
    rounding: str | None
    group_size: int | None
    sensitivity: float | None
    bytes_before: int
    bytes_after: int
    copies: int
    reason: str

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def table_lines(rows: Sequence[Row], note: str, average_bits: float | None) -> Iterator[str]:
    """The lines of ``print(report)``."""
    shown = [row for row in rows if row.bytes_before or row.bytes_after]
    free = len(rows) - len(shown)
    lines = [_COLUMNS, *(_cells(row) for row in shown)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    if shown:
        for line in lines:
            yield "  ".join(_pad(cell, w, c) for cell, w, c in zip(line, widths, _COLUMNS, strict=True)).rstrip()
    if free:
        reasons = ", ".join(_count_reasons(row.reason for row in rows if row not in shown))
        yield f"and {free} saved values that cost nothing ({reasons})"
    if note:
        yield f"gact_fx: {note}"
    if shown:
        bits = f", {average_bits:.2f} bits per compressed element" if average_bits else ""
        before, after = sum(row.bytes_before for row in rows), sum(row.bytes_after for row in rows)
        ratio = before / after if after else 1.0
        yield f"held for backward: {_size(before)} before, {_size(after)} after ({ratio:.1f}x{bits})"


def _cells(row: Row) -> tuple[str, ...]:
    sensitivity = f"{row.sensitivity:.2e}" if row.sensitivity is not None else ""
    bits = str(row.bits) if row.bits is not None else ""
    shape = "x".join(map(str, row.shape)) or "scalar"
    sizes = (_size(row.bytes_before), _size(row.bytes_after))
    # bfloat16 codes have neither rounding to speak of nor groups.
    code = f"{row.rounding} {row.group_size}" if row.rounding and row.bits != BFLOAT16_BITS else ""
    graph = "eager" if row.graph is None else str(row.graph) if row.runs == 1 else f"{row.graph} ({row.runs}x)"
    return (graph, row.name, row.op, shape, row.dtype, row.encoding, bits, code, sensitivity, *sizes, row.reason)


def _count_reasons(reasons: Iterable[str]) -> list[str]:
    counts: dict[str, int] = {}
    for reason in reasons:
        reason = "the same memory as another" if reason.startswith("the same memory") else reason
        counts[reason] = counts.get(reason, 0) + 1
    return [f"{count} {reason}" for reason, count in counts.items()]


def _pad(cell: str, width: int, column: str) -> str:
    return cell.rjust(width) if column in _RIGHT else cell.ljust(width)


def _size(nbytes: int) -> str:
    if nbytes < 1000:
        return f"{nbytes} B"
    return f"{nbytes / 1e3:.1f} kB" if nbytes < 1e6 else f"{nbytes / 1e6:.1f} MB"
