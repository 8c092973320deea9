"""``report.save("report.html")``: one page that needs no network."""

from collections.abc import Iterator, Sequence
from html import escape

from gact_fx.diagnostics.contents import Contents
from gact_fx.diagnostics.cures import largest_exact
from gact_fx.diagnostics.full_table import COLUMNS, RIGHT, cells
from gact_fx.diagnostics.html_charts import scatter_charts, timeline_charts
from gact_fx.diagnostics.html_graphs import Texts, graph_sections
from gact_fx.diagnostics.html_style import SCRIPT, STYLE
from gact_fx.diagnostics.memory_timeline import Timeline
from gact_fx.diagnostics.report_rows import Row, noise_shares
from gact_fx.diagnostics.summary import MODULE_COLUMNS, megabytes, module_cells, totals

_ABOUT_TIME = (
    "What is live at each operator of a step, read off the graphs; parameters, gradients and the batch are left out. "
    "What Inductor is expected never to have in memory is left out, too."
)
_ABOUT_TENSORS = "A point is a tensor with codes; the pointer over a point shows its name."
_EXACT_COLUMNS = ("module", "operator", "tensors", "MB", "why", "remedy")
_HEIGHT_IN_NOTEBOOKS = 900


def page(report: Contents, timeline: Timeline, *, with_graphs: bool = True) -> str:
    """The page as text; whatever comes from the model is escaped."""
    texts = Texts()
    time, tensors = timeline_charts(timeline), scatter_charts(report.rows)
    sections = {
        "By module, in MB": _table(MODULE_COLUMNS, module_cells(report), MODULE_COLUMNS[1:]) if report.rows else "",
        "Memory over a step": f"{time}<p class='note'>{_ABOUT_TIME}</p>" if time else "",
        "Bits, noise and bytes": f"{tensors}<p class='note'>{_ABOUT_TENSORS}</p>" if tensors else "",
        "The largest that stay exact": _exact(report.rows),
        "Every tensor": _rows(report.rows),
        "The graphs before and after each pass": graph_sections(report.stages, texts) if with_graphs else "",
    }
    body = [_headline(report), *(f"<h2>{name}</h2>{text}" for name, text in sections.items() if text), texts.packed()]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>gact_fx report</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}<script>{SCRIPT}</script></body></html>\n"
    )


def frame(document: str) -> str:
    """``document`` in a frame, whose styles and scripts a notebook does not get."""
    style = f"width:100%;height:{_HEIGHT_IN_NOTEBOOKS}px;border:0;background:#fff"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(document, quote=True)}"></iframe>'


def _headline(report: Contents) -> str:
    if report.rows and report.bytes_after:
        title = (
            f"<b>{megabytes(report.bytes_before)} MB</b> held for backward become "
            f"<b>{megabytes(report.bytes_after)} MB</b>: {report.ratio:.1f} times less"
        )
    else:
        title = "gact_fx report"
    lines = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>"
        for name, text in (totals(report) if report.rows else [])
    )
    messages = [report.note, *report.warnings]
    warnings = "".join(f'<p class="warning">{escape(text)}</p>' for text in messages if text)
    return f'<h1>{title}</h1><table class="totals">{lines}</table>{warnings}'


def _exact(rows: Sequence[Row]) -> str:
    lines = []
    for kind in largest_exact(rows):
        lines.append((kind.module, kind.op, str(kind.count), megabytes(kind.nbytes), kind.reason, kind.remedy))
    return _table(_EXACT_COLUMNS, lines, ("tensors", "MB")) if lines else ""


def _rows(rows: Sequence[Row]) -> str:
    """All rows that take memory, sortable by the values behind the cells."""
    shares = noise_shares(rows)
    shown = [(row, share) for row, share in zip(rows, shares, strict=True) if row.bytes_before or row.bytes_after]
    if not shown:
        return ""
    lines = [cells(row, share) for row, share in shown]
    # Text sorts as it is; numbers by their values.
    values = [_values(row, share) for row, share in shown]
    return _table(COLUMNS, lines, RIGHT, values)


def _values(row: Row, share: float | None) -> dict[str, float]:
    found = {
        "graph": row.graph, "shape": row.numel, "bits": row.bits, "sensitivity": row.sensitivity, "noise": share,
        "before": row.bytes_before, "after": row.bytes_after,
    }  # fmt: skip
    return {name: -1.0 if value is None else float(value) for name, value in found.items()}


def _table(
    columns: Sequence[str],
    lines: Sequence[Sequence[str]],
    right: Sequence[str],
    values: Sequence[dict[str, float]] | None = None,
) -> str:
    """A table with ``right`` columns on the right; by a click on a heading it sorts where there are ``values``."""
    kinds = ["r" if column in right else "l" for column in columns]
    heads = "".join(f'<th class="{kind}">{escape(name)}</th>' for name, kind in zip(columns, kinds, strict=True))
    body = "".join(
        f"<tr>{''.join(_cells(columns, kinds, line, values[i] if values else {}))}</tr>" for i, line in enumerate(lines)
    )
    kind = " sortable" if values else ""
    inner = f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll{" long" if values else ""}"><table class="data{kind}">{inner}</table></div>'


def _cells(
    columns: Sequence[str], kinds: Sequence[str], line: Sequence[str], values: dict[str, float]
) -> Iterator[str]:
    for column, kind, text in zip(columns, kinds, line, strict=True):
        value = f' data-v="{values[column]:.6g}"' if column in values else ""
        # Where the table is too wide, names go on in another line behind a dot; a table that sorts scrolls instead.
        shown = escape(text) if kind == "r" or values else escape(text).replace(".", ".<wbr>")
        yield f'<td class="{kind}"{value}>{shown}</td>'
