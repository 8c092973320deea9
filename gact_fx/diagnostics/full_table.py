"""``report.table()``: every saved tensor, a line each."""

from collections import Counter
from collections.abc import Iterator

from gact_fx.codec.by_place import picture
from gact_fx.codec.layout import BFLOAT16_BITS
from gact_fx.diagnostics.contents import Contents
from gact_fx.diagnostics.gradient_error import table
from gact_fx.diagnostics.noise import share_text
from gact_fx.diagnostics.report_rows import Row, noise_shares
from gact_fx.training.progress import size

COLUMNS = (
    "graph", "module", "tensor", "op", "shape", "dtype", "stored", "bits", "before", "after", "noise", "sensitivity",
    "code", "reason",
)  # fmt: skip
RIGHT = ("graph", "bits", "sensitivity", "noise", "before", "after")


def full_table(report: Contents) -> str:
    """Every tensor that takes memory, and how many others there are."""
    return "\n".join(_lines(report))


def cells(row: Row, noise: float | None) -> tuple[str, ...]:
    """The cells of one row; ``noise`` is its share of the variance that all codes add."""
    sensitivity = f"{row.sensitivity:.2e}" if row.sensitivity is not None else ""
    bits = f"{row.bits:.3g}" if row.bits is not None else ""
    shape = "x".join(map(str, row.shape)) or "scalar"
    # bfloat16 codes have neither rounding to speak of nor groups.
    code = f"{row.rounding} {row.group_size}" if row.rounding and row.bits != BFLOAT16_BITS else ""
    code += f" {picture(row.by_place)}" if row.by_place else " per channel" if row.per_channel else ""
    graph = "eager" if row.graph is None else str(row.graph) if row.runs == 1 else f"{row.graph} ({row.runs}x)"
    return (
        graph, row.module, row.name, row.op, shape, row.dtype, row.encoding, bits, size(row.bytes_before),
        size(row.bytes_after), share_text(noise) if row.bits is not None else "", sensitivity, code, row.reason,
    )  # fmt: skip


def _lines(report: Contents) -> Iterator[str]:
    shares = noise_shares(report.rows)
    pairs = list(zip(report.rows, shares, strict=True))
    shown = [cells(row, share) for row, share in pairs if row.bytes_before or row.bytes_after]
    if shown:
        yield from table([COLUMNS, *shown], RIGHT)
    free = [row.reason for row in report.rows if not row.bytes_before and not row.bytes_after]
    if free:
        alike = "the same memory as another"
        counts = Counter(alike if reason.startswith("the same memory") else reason for reason in free)
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items())
        yield f"and {len(free)} saved values that cost nothing ({reasons})"
    if report.note:
        yield f"gact_fx: {report.note}"
    if shown:
        bits = f", {report.average_bits:.2f} bits per compressed element" if report.average_bits else ""
        sizes = f"{size(report.bytes_before)} before, {size(report.bytes_after)} after"
        yield f"held for backward: {sizes} ({report.ratio:.1f}x{bits})"
