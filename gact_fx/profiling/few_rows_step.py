"""The graphs of a training step, each with the same few rows of the batch, and how gradients flow from one to another.

Graphs behind a break read what those before it have computed. Which one did, autograd's nodes say while forward runs.
Eager PyTorch between two graphs ran on the whole batch: its gradients are taken with zeros in all other rows.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gact_fx.breaks.eager_vjp import EagerVJP, End, Entry, follow
from gact_fx.breaks.vjp_of_rows import Rows, VJPOfRows
from gact_fx.errors import first_line
from gact_fx.graphs.aot import GraphPair
from gact_fx.passes.graph_analysis import GraphAnalysis
from gact_fx.profiling.few_rows import FewRows
from gact_fx.profiling.tape import Place, Step

log = logging.getLogger("gact_fx")
# What the rows of a part save, uncompressed, at the least: fewer take little memory anyway, and whether biases of rows
# point one way shows where they are measured together.
PART_NBYTES = 2**22
# By how many times the squared norms of the gradients of parts may differ: means over more or fewer labels count alike.
ALIKE = 4.0
# A graph's number in the step, and the position of one of its results.
Result = tuple[int, int]


class FewRowsStep:
    """A few rows of the graphs that ran in a step so far, in forward's order."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, FewRows] = {}
        # Of every graph, the activations among its inputs, by position.
        self._sources: list[dict[int, Result | EagerVJP]] = []
        # What the last graph gave, until autograd's nodes of that are known; and where gradients enter all graphs.
        self._results: list[Any] = []
        self._made: dict[Entry, Result] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, graph: Hashable) -> bool:
        return graph in self._graphs

    def add(self, graph: Hashable, pair: GraphPair, analysis: GraphAnalysis, inputs: Sequence[Any]) -> bool:
        """Keep a few rows of what ``graph`` reads; False where that is no way, or nobody knows what computed it.

        Raises:
            ValueError: sizes depend on the rows in another way than as multiples.
        """
        sources = {position: self._source(x) for position, x in enumerate(inputs) if self._graphs and _has_history(x)}
        known = {position: source for position, source in sources.items() if source is not None}
        few = FewRows.of(pair, analysis, inputs, next(iter(self._graphs.values()), None))
        if few is None or len(known) < len(sources):
            return False
        self._graphs[graph] = few
        self._sources.append(known)
        return True

    def _source(self, x: torch.Tensor) -> Result | EagerVJP | None:
        assert x.grad_fn is not None
        return self._made.get((x.grad_fn, x.output_nr)) or follow(x, self._made)

    def ran(self, results: Sequence[Any]) -> None:
        """The graph that was added last has given these."""
        self._results = list(results)

    def note_results(self) -> None:
        """Autograd has nodes by now for what the graph gave."""
        for position, x in enumerate(self._results):
            if isinstance(x, torch.Tensor) and x.grad_fn is not None:
                self._made[x.grad_fn, x.output_nr] = len(self._graphs) - 1, position
        self._results = []

    def begin_backward(self, graph: Hashable, arguments: Sequence[Any]) -> list[Any] | None:
        """Keep tangents among the ``arguments`` of the whole batch's backward pass; forward is over.

        Returns the inputs of the graph that no other one computed, None where no run of it waits for backward.
        """
        # Nodes would hold what they save for as long as they are known.
        self._link()
        few = self._graphs.get(graph)
        if few is None or few.tangents:
            return None
        few.keep_tangents(arguments)
        return few.own_inputs

    def end_backward(self, graph: Hashable, results: Sequence[Any]) -> None:
        """What the whole batch's backward pass gave."""
        self._graphs[graph].keep_results(results)

    def _link(self) -> None:
        places: dict[Result, Place] = {}
        for index, (few, sources) in enumerate(zip(self._graphs.values(), self._sources, strict=True)):
            if sources:
                links = {
                    at: x.towards(places) if isinstance(x, EagerVJP) else places.get(x) for at, x in sources.items()
                }
                few.links = {at: link for at, link in links.items() if link is not None}
            places |= {(index, at): (index, tangent) for at, tangent in few.pair.tangents_of_outputs().items()}
        self._sources = [{} for _ in self._graphs]
        self._made, self._results = {}, []

    @property
    def device_types(self) -> frozenset[str]:
        """Where the graphs run."""
        return frozenset().union(*(few.device_types for few in self._graphs.values()))

    def recordings(self, parts: int) -> list[Callable[[], list[Step]]]:
        """What runs forward on some of the rows, and gives their backward passes; to be measured one after the other.

        ``parts`` is how many there are, unless rows depend on each other. A step knows by how many times the whole
        batch's variance is that of its rows.

        Raises:
            ValueError: that cannot be told, the rows have next to no gradient, or a graph had no backward pass.
        """
        graphs = list(self._graphs.values())
        if not all(few.tangents for few in graphs):
            raise ValueError("a graph of the step had no backward pass")
        several = _in_parts(graphs, parts)
        weights = _weights_of(several) if len(several) > 1 else []
        if not weights:
            steps = _weighed(graphs)
            return [lambda: steps]
        return [partial(_weighed, part, weights) for part in several]


def _in_parts(graphs: Sequence[FewRows], count: int) -> list[list[FewRows]]:
    """The rows in ``count`` parts, or all in one where they depend on each other or take little memory."""
    few = graphs[0].few
    is_small = few % count or few / count * sum(each.row_nbytes for each in graphs) < PART_NBYTES
    if count == 1 or is_small or not all(each.can_be_parted(count) for each in graphs):
        return [list(graphs)]
    return [[each.part(first, count) for each in graphs] for first in range(count)]


def _weights_of(parts: Sequence[Sequence[FewRows]]) -> list[float]:
    """By graph, the weights of parts; none where these are to be measured together: they count differently, or fail.

    The loss of a part is no number where all of its labels are left out.
    """
    weights: list[float] = []
    norms: list[list[float]] = [[] for _ in parts[0]]
    try:
        for part in parts:
            numbers: dict[int, int] = {}
            for few, found in zip(part, norms, strict=True):
                step, loss = few.run(numbers)
                found.append(few.checked_norm(step))
                del step
                # All parts have as many rows, and one loss.
                if len(weights) < len(part):
                    weights.append(few.weight(loss))
    except Exception as error:
        log.info("rows are measured together: of one alone, profiling failed with %s", first_line(error))
        return []
    pairs = zip(parts[0], norms, strict=True)
    return weights if all(few.sums_rows or max(found) <= ALIKE * min(found) for few, found in pairs) else []


def _weighed(graphs: Sequence[FewRows], weights: Sequence[float] = ()) -> list[Step]:
    """The backward passes of ``graphs`` on their few rows; their ``weights``, where these are known."""
    steps: list[Step] = []
    found = list(weights)
    numbers: dict[int, int] = {}
    for few in graphs:
        step, loss = few.run(numbers)
        if len(found) < len(graphs):
            few.checked_norm(step)
            found.append(few.weight(loss))
        steps.append(_linked(step, few, graphs))
    # The mean of a few rows counts each of them for more than the whole batch did, whose tangents other graphs have.
    most = max(found)
    return [
        replace(step, weight=most, arguments=_scaled(step, (weight / most) ** 0.5))
        for step, weight in zip(steps, found, strict=True)
    ]


def _linked(step: Step, few: FewRows, graphs: Sequence[FewRows]) -> Step:
    """``step`` with the places that the gradients of its inputs flow on to."""
    flows: dict[int, Place] = {}
    detours: dict[int, VJPOfRows] = {}
    placeholders = few.pair.forward.graph.find_nodes(op="placeholder")
    for output, position in few.pair.gradients_of_inputs().items():
        link = few.links.get(position)
        if isinstance(link, EagerVJP):
            given = few.rows_of(placeholders[position])
            detours[output] = VJPOfRows(link, given, [_rows_of(end, graphs) for end in link.ends])
        elif link is not None:
            flows[output] = link
    return replace(step, flows=flows, detours=detours)


def _rows_of(end: End, graphs: Sequence[FewRows]) -> Rows | None:
    if end.is_leaf:
        return None
    index: int = end.of[0]
    placeholders = graphs[index].pair.backward.graph.find_nodes(op="placeholder")
    return graphs[index].rows_of(next(node for node in placeholders if node.name == end.of[1]))


def _scaled(step: Step, factor: float) -> Sequence[Any]:
    """The arguments of a backward pass with ``factor`` times its tangents."""
    if factor == 1:
        return step.arguments
    names, placeholders = step.pair.tangents(), step.backward.graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, step.arguments, strict=True)
    return [factor * x if node.name in names and isinstance(x, torch.Tensor) else x for node, x in pairs]


def _has_history(x: Any) -> bool:
    """Whether a gradient goes on from ``x``."""
    return isinstance(x, torch.Tensor) and x.numel() > 0 and x.requires_grad and not x.is_leaf
