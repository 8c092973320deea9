"""What somebody at a terminal sees while a model is profiled, planned and compiled."""

import logging
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from gact_fx.passes.graph_analysis import held_nbytes
from gact_fx.plan import Plan
from gact_fx.planning.budget import GraphTensors

log = logging.getLogger("gact_fx")


def profiling_bar() -> Any:
    """A bar of the tensors that are profiled, gone when it is closed; none where stderr is no terminal."""
    return tqdm(desc="gact_fx: profiling", unit="tensor", disable=None, leave=False, total=0)


def say(text: str) -> None:
    """Log ``text``, and write it to a terminal that would not see the log."""
    log.info(text)
    # Programs without a console have no stderr.
    if sys.stderr is not None and sys.stderr.isatty() and not log.isEnabledFor(logging.INFO):
        tqdm.write(f"gact_fx: {text}", file=sys.stderr)


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
