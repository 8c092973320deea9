"""What a run says: the logger ``gact_fx``, and a terminal where nobody reads that.

At INFO a run tells its story in five lines; on a terminal they are written unless the log has them. Warnings go to
stderr where the program handles no log records, as Python has it for loggers without handlers.
``logging.getLogger("gact_fx").setLevel(...)`` rules all of that, and the bar.
"""

import logging
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from gact_fx.passes.graph_analysis import held_nbytes
from gact_fx.plan import Plan
from gact_fx.planning.budget import GraphTensors

log = logging.getLogger("gact_fx")


class LastResort(logging.NullHandler):
    """Writes warnings where no other handler would, past the bar; ``logging.lastResort = None`` silences it, too."""

    def handle(self, record: logging.LogRecord) -> bool:
        """Write ``record`` to stderr if nobody else does."""
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and not _is_handled():
            _write(record.getMessage())
        return True


def profiling_bar() -> Any:
    """A bar of the tensors that are profiled, gone when it is closed; none where stderr is no terminal."""
    disable = True if _is_silenced() else None
    return tqdm(desc="gact_fx: profiling", unit="tensor", disable=disable, leave=False, total=0)


def say(text: str) -> None:
    """Log ``text``, and write it to a terminal that would not see the log."""
    log.info(text)
    # Programs without a console have no stderr.
    is_read = log.isEnabledFor(logging.INFO) or _is_silenced()
    if not is_read and sys.stderr is not None and sys.stderr.isatty():
        _write(text)


def say_planned(title: str, plan: Plan, graphs: Sequence[GraphTensors]) -> None:
    """Say what a new plan of the model called ``title`` makes of what its graphs hold, and that it is compiled."""
    total = sum(len(graph.tensors) for graph in plan.graphs)
    parts = [f"{title}: planned {total} saved tensors in {len(plan.graphs)} graphs", sizes(plan, graphs)]
    if plan.variance is not None and plan.minibatch_variance:
        share = plan.variance / plan.minibatch_variance
        parts.append(f"the gradient's variance grows by {100 * share:.2g} % of what it is from batch to batch")
    say("; ".join(filter(None, parts)))
    say(f"{title}: compiling, about as long as torch.compile takes")
    if not total:
        log.warning(
            "%s: nothing to compress: no saved tensor is eligible; gact_fx.inspect(model) gives the reasons", title
        )


def _write(text: str) -> None:
    if sys.stderr is not None:
        tqdm.write(f"gact_fx: {text}", file=sys.stderr)


def _is_silenced() -> bool:
    """Whether somebody wants less of this logger than INFO."""
    return log.level > logging.INFO or log.disabled


def _is_handled() -> bool:
    """Whether any handler but our own sees this logger's records."""
    logger: logging.Logger | None = log
    while logger is not None:
        if any(not isinstance(handler, LastResort) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def sizes(plan: Plan, graphs: Sequence[GraphTensors]) -> str:
    """What the profiled graphs hold for backward without ``plan`` and with it, '' where it knows none of them."""
    pairs = [(graph, plan.graph(graph.fingerprint)) for graph in graphs]
    known = [(graph, found.entries()) for graph, found in pairs if found is not None]
    if not known:
        return ""
    before = sum(graph.runs * held_nbytes(graph.analysis, None) for graph, _ in known)
    after = sum(graph.runs * held_nbytes(graph.analysis, entries) for graph, entries in known)
    return f"{size(before)} held for backward become {size(after)}"


def size(nbytes: int) -> str:
    """For people, in decimal units."""
    if nbytes < 1000:
        return f"{nbytes} B"
    return f"{nbytes / 1e3:.1f} kB" if nbytes < 1e6 else f"{nbytes / 1e6:.1f} MB"
