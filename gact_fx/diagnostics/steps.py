"""What training steps held for backward, graph by graph."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gact_fx.diagnostics.report_rows import Row
from gact_fx.training.progress import size

LARGEST, LAST, PREDICTED = "largest", "last", "predicted"


@dataclass(frozen=True)
class GraphSizes:
    """What the ``runs`` of one graph hold for backward in a step, in bytes; ``graph`` is None for eager PyTorch."""

    graph: int | None
    runs: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class StepSizes:
    """What one training step holds for backward, in bytes: ``name`` is "last", "largest" or "predicted"."""

    name: str
    graphs: tuple[GraphSizes, ...]

    @property
    def bytes_before(self) -> int:
        return sum(graph.bytes_before for graph in self.graphs)

    @property
    def bytes_after(self) -> int:
        return sum(graph.bytes_after for graph in self.graphs)

    @property
    def ratio(self) -> float:
        """``bytes_before / bytes_after``; 1 where nothing is held."""
        return self.bytes_before / self.bytes_after if self.bytes_after else 1.0

    def __str__(self) -> str:
        return f"{size(self.bytes_before)} before, {size(self.bytes_after)} after ({self.ratio:.1f}x)"


def step_sizes(name: str, rows: Iterable[Row]) -> StepSizes:
    """The step that ``rows`` tell of."""
    by_graph: dict[int | None, list[Row]] = {}
    for row in rows:
        by_graph.setdefault(row.graph, []).append(row)
    return StepSizes(name, tuple(_sizes(graph, found) for graph, found in by_graph.items()))


def _sizes(graph: int | None, rows: Sequence[Row]) -> GraphSizes:
    before, after = sum(row.bytes_before for row in rows), sum(row.bytes_after for row in rows)
    return GraphSizes(graph, rows[0].runs, before, after)
