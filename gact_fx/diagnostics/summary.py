"""``print(report)``: what a model holds, module by module, on one screen."""

from collections.abc import Iterator, Sequence

from gact_fx.diagnostics.contents import Contents
from gact_fx.diagnostics.cures import largest_exact
from gact_fx.diagnostics.gradient_error import table
from gact_fx.diagnostics.modules import by_module
from gact_fx.diagnostics.noise import noise_sentence, share_text
from gact_fx.diagnostics.report_rows import Row
from gact_fx.diagnostics.steps import PREDICTED, GraphSizes, StepSizes
from gact_fx.passes.encodings import Keep

MODULE_COLUMNS = ("module", "before", "after", "ratio", "bits", "noise")
# What stays exact is listed where it takes this share of all that is held.
WORTH_LISTING = 0.01
# Of a step that runs more graphs, the largest are shown.
MOST_GRAPHS = 6


def megabytes(nbytes: float) -> str:
    """Bytes in units of 10^6, to the hundredth below 100 of them."""
    found = nbytes / 1e6
    return f"{found:.2f}" if found < 100 else f"{found:,.1f}"


def times(before: float, after: float) -> str:
    """How many times less ``after`` is."""
    return f"{before / after:.1f}x" if after and before else ""


def summary(report: Contents) -> str:
    """By module what is held before and after, what stays exact and why, totals, and warnings with their cures."""
    parts = (_modules(report), _exact(report.rows), _totals(report), _messages(report))
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def totals(report: Contents) -> list[tuple[str, str]]:
    """What there is to say of the model as a whole: a name and a text each."""
    bits = report.average_bits
    noise = noise_sentence(report.plan)
    held = f"{megabytes(report.bytes_before)} MB before, {megabytes(report.bytes_after)} MB after"
    is_predicted = any(step.name == PREDICTED for step in report.steps)
    lines = [("held for backward", f"{held} ({report.ratio:.1f}x){', as predicted' if is_predicted else ''}")]
    lines += peaks_text(report)
    lines += logits_text(report)
    lines += [("bits", f"{bits:.2f} per compressed element, metadata and masks included")] if bits else []
    lines += [("noise", noise)] if noise else []
    return lines + steps_text(report.steps)


def peaks_text(report: Contents) -> list[tuple[str, str]]:
    """The most that is live at a time: of activations, and in a whole step."""
    activations, predicted, gradients = report.peak_activations, report.peak_predicted, report.gradients
    if activations is None or predicted is None or gradients is None:
        return []
    before = "" if report.peak_before is None else f"{megabytes(report.peak_before)} MB before, "
    after = "after, " if before else ""
    measured = "" if report.peak_measured is None else f", {megabytes(report.peak_measured)} MB measured"
    whole = f"{megabytes(predicted)} MB as predicted{measured}; {megabytes(gradients)} MB of gradients included"
    return [
        ("peak of activations", f"{before}{megabytes(activations)} MB {after}as predicted"), ("peak of a step", whole)
    ]  # fmt: skip


def logits_text(report: Contents) -> list[tuple[str, str]]:
    """What logits cost that the model returns, or that are never there whole."""
    whole, avoided, lines = report.logits.whole, report.logits.avoided, []
    if whole:
        remedy = "if you read the loss alone, loss_only=True avoids those that are only returned"
        lines.append(f"{megabytes(whole)} MB, since the model returns or reads them; {remedy}")
    if avoided:
        lines.append(f"{megabytes(avoided)} MB are never in memory: the loss reads some classes at a time")
    return [("logits" if index == 0 else "", text) for index, text in enumerate(lines)]


def steps_text(steps: Sequence[StepSizes]) -> list[tuple[str, str]]:
    """The steps that the report knows, and their graphs where these are several."""
    lines = []
    for step in steps:
        if len(steps) > 1 or len(step.graphs) > 1:
            held = f"{megabytes(step.bytes_before)} MB before, {megabytes(step.bytes_after)} MB after"
            lines.append((f"{step.name} step", held))
            lines += [("", text) for text in _graphs(step.graphs)]
    return lines


def _graphs(graphs: Sequence[GraphSizes]) -> Iterator[str]:
    shown = sorted(graphs, key=lambda graph: -graph.bytes_before)[:MOST_GRAPHS] if len(graphs) > 1 else graphs
    for graph in graphs:
        if graph in shown:
            name = "eager PyTorch" if graph.graph is None else f"graph {graph.graph}"
            runs = f" ({graph.runs}x)" if graph.runs > 1 else ""
            yield f"{name}{runs}: {megabytes(graph.bytes_before)} MB before, {megabytes(graph.bytes_after)} MB after"
    if len(graphs) > len(shown):
        yield f"and {len(graphs) - len(shown)} smaller graphs"


def module_cells(report: Contents) -> list[tuple[str, ...]]:
    """A line for each module, or for repeated ones, and the total."""
    lines = []
    for line in by_module(report.rows):
        bits = f"{line.bits:.1f}" if line.bits is not None else "exact"
        sizes = megabytes(line.bytes_before), megabytes(line.bytes_after), times(line.bytes_before, line.bytes_after)
        lines.append((line.label, *sizes, bits, share_text(line.noise)))
    bits = f"{report.average_bits:.1f}" if report.average_bits is not None else "exact"
    sizes = (
        megabytes(report.bytes_before),
        megabytes(report.bytes_after),
        times(report.bytes_before, report.bytes_after),
    )
    has_noise = any(row.variance for row in report.rows)
    return [*lines, ("total", *sizes, bits, "100 %" if has_noise else "")]


def _modules(report: Contents) -> Iterator[str]:
    lines = module_cells(report)
    if len(lines) > 1:
        yield "held for backward by module, in MB"
        yield from table([MODULE_COLUMNS, *lines], MODULE_COLUMNS[1:])


def _exact(rows: Sequence[Row]) -> Iterator[str]:
    exact = [row for row in rows if row.encoding == Keep.label and row.bytes_after]
    if not exact:
        return
    held, total = sum(row.bytes_after for row in exact), sum(row.bytes_after for row in rows)
    share = f"{share_text(held / total)} of what is held"
    if held < WORTH_LISTING * total:
        yield f"{len(exact)} tensors stay exact, {megabytes(held)} MB in all, {share}: too little to matter"
        return
    yield f"{len(exact)} tensors stay exact, {megabytes(held)} MB in all, {share}; the largest, in MB:"
    for kind in largest_exact(rows):
        count = f"{kind.count} of " if kind.count > 1 else ""
        yield f"{megabytes(kind.nbytes):>7}  {kind.module}: {count}{kind.op}"
        yield f"         why: {kind.reason or 'not known'}"
        if kind.remedy:
            yield f"         remedy: {kind.remedy}"


def _totals(report: Contents) -> Iterator[str]:
    found = totals(report) if report.rows else []
    width = max((len(name) for name, _ in found), default=0)
    for name, text in found:
        yield f"{name + ':' if name else '':{width + 1}} {text}"


def _messages(report: Contents) -> Iterator[str]:
    if report.note:
        yield f"gact_fx: {report.note}"
    for text in report.warnings:
        yield f"warning: {text}"
