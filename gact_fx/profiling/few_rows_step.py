"""The graphs of a training step, each with the same few rows of the batch, and how gradients flow from one to another.

Graphs behind a break read what those before it have computed. Which one did, autograd's nodes say while forward runs.
What eager PyTorch computes between graphs is not followed: such a step is recorded whole (`Tape`).
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd.function import BackwardCFunction

from gact_fx.errors import first_line
from gact_fx.graphs.aot import GraphPair
from gact_fx.passes.graph_analysis import GraphAnalysis
from gact_fx.profiling.few_rows import FewRows
from gact_fx.profiling.tape import Place, Step, has_history

log = logging.getLogger("gact_fx")
# What the rows of a part save, uncompressed, at the least: fewer take little memory anyway, and whether biases of rows
# point one way shows where they are measured together.
PART_NBYTES = 2**22
# By how many times the squared norms of the gradients of parts may differ: means over more or fewer labels count alike.
ALIKE = 4.0


class FewRowsStep:
    """A few rows of the graphs that ran in a step so far, in forward's order."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, FewRows] = {}
        # What the last graph gave, until autograd's node of that is known. Nodes hold what they save, and die with it.
        self._results: tuple[int, list[Any]] = 0, []
        self._made: WeakKeyDictionary[BackwardCFunction, dict[int, Place]] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, graph: Hashable) -> bool:
        return graph in self._graphs

    def add(self, graph: Hashable, pair: GraphPair, analysis: GraphAnalysis, inputs: Sequence[Any]) -> bool:
        """Keep a few rows of what ``graph`` reads; False where that cannot be done, or nobody knows what computed it.

        Raises:
            ValueError: sizes depend on the rows in another way than as multiples.
        """
        first = next(iter(self._graphs.values()), None)
        few = FewRows.of(pair, analysis, inputs, first)
        if few is None:
            return False
        links: dict[int, Place] = {}
        for position, node in enumerate(pair.forward.graph.find_nodes(op="placeholder")):
            x = inputs[position]
            if first is not None and has_history(x):
                # Other nodes are of what eager PyTorch ran, or of views.
                is_of_graph = isinstance(x.grad_fn, BackwardCFunction)
                place = self._made.get(x.grad_fn, {}).get(x.output_nr) if is_of_graph else None
                if place is None or not (few.has_rows_apart(node) and self._has_rows_apart(place)):
                    log.info("a graph reads the result of %s, and is not measured on a few rows", x.grad_fn.name())
                    return False
                links[position] = place
        self._graphs[graph] = replace(few, links=links)
        return True

    def _has_rows_apart(self, place: Place) -> bool:
        few = list(self._graphs.values())[place[0]]
        tangents = few.pair.backward.graph.find_nodes(op="placeholder")
        return any(few.has_rows_apart(node) for node in tangents if node.name == place[1])

    def ran(self, graph: Hashable, results: Sequence[Any]) -> None:
        """What ``graph`` has given."""
        self._results = list(self._graphs).index(graph), list(results)

    def note_results(self) -> None:
        """Autograd has nodes by now for what the last graph gave."""
        (index, results), self._results = self._results, (0, [])
        tangents = list(self._graphs.values())[index].pair.tangents_of_outputs() if results else {}
        for position, tangent in tangents.items():
            x = results[position]
            if isinstance(x, torch.Tensor) and isinstance(x.grad_fn, BackwardCFunction):
                self._made.setdefault(x.grad_fn, {})[x.output_nr] = index, tangent

    def begin_backward(self, graph: Hashable, arguments: Sequence[Any]) -> list[Any] | None:
        """Keep tangents among the ``arguments`` of the whole batch's backward pass.

        Returns the inputs of the graph that no other one computed, None where no run of it waits for backward.
        """
        few = self._graphs.get(graph)
        if few is None or few.tangents:
            return None
        few.keep_tangents(arguments)
        return few.own_inputs

    def end_backward(self, graph: Hashable, results: Sequence[Any]) -> None:
        """What the whole batch's backward pass gave."""
        self._graphs[graph].keep_results(results)

    @property
    def device_types(self) -> frozenset[str]:
        """Where the graphs run."""
        return frozenset().union(*(few.device_types for few in self._graphs.values()))

    def recordings(self, parts: int) -> list[Callable[[], list[Step]]]:
        """What runs forward on some of the rows, and gives their backward passes; to be measured one after the other.

        ``parts`` is how many there are, unless rows depend on each other. A step knows by how many times the whole
        batch's variance is that of its rows.

        Raises:
            ValueError: that cannot be told, or the rows have next to no gradient.
        """
        graphs = self._with_backward()
        several = _in_parts(graphs, parts)
        weights = _weights_of(several) if len(several) > 1 else []
        if not weights:
            steps = _weighed(graphs)
            return [lambda: steps]
        return [partial(_weighed, part, weights) for part in several]

    def _with_backward(self) -> list[FewRows]:
        """The graphs that ran backward, linked by their numbers among these."""
        ran = [index for index, few in enumerate(self._graphs.values()) if few.tangents]
        numbers = {index: number for number, index in enumerate(ran)}
        return [
            replace(few, links={at: (numbers[i], name) for at, (i, name) in few.links.items() if i in numbers})
            for few in self._graphs.values()
            if few.tangents
        ]


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
        steps.append(step)
    # The mean of a few rows counts each of them for more than the whole batch did, whose tangents other graphs have.
    most = max(found)
    return [
        replace(step, weight=most, arguments=_scaled(step, (weight / most) ** 0.5))
        for step, weight in zip(steps, found, strict=True)
    ]


def _scaled(step: Step, factor: float) -> Sequence[Any]:
    """The arguments of a backward pass with ``factor`` times its tangents."""
    if factor == 1:
        return step.arguments
    names, placeholders = step.pair.tangents(), step.backward.graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, step.arguments, strict=True)
    return [factor * x if node.name in names and isinstance(x, torch.Tensor) else x for node, x in pairs]
