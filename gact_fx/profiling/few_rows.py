"""A few rows of a batch stand for all of them: what is measured on these takes so much less memory.

The step itself runs on the whole batch. Of it a few rows of what forward reads and of the tangents are kept, and when
backward has ended the same graphs run on these, whose rows were traced as a size that varies: on one half of them after
the other, unless rows depend on each other.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.compilers import interpret_graph
from gact_fx.graphs.edit import copy_module, is_float_tensor
from gact_fx.graphs.operators import has_collectives
from gact_fx.graphs.replay import Replay
from gact_fx.graphs.sizes import RowSymbol, is_symbolic, known_symbols, with_symbols
from gact_fx.graphs.trees import tree_map
from gact_fx.passes.graph_analysis import GraphAnalysis
from gact_fx.profiling.gradients import squared_norm
from gact_fx.profiling.tape import Place, Step
from gact_fx.profiling.tied_rows import are_tied

# The fewest rows that are measured, and the bytes that these save, uncompressed: of fewer, figures scatter.
FEWEST = 2
ENOUGH_NBYTES = 2**23
# By how many times the gradient of a few rows may be larger or smaller than sums and means explain.
SLACK = 30.0
_aten = torch.ops.aten
# Which argument has the dimensions of operators that are others where there is one row.
_OTHERS_OF_ONE_ROW = {
    _aten.squeeze.default: None,
    _aten.squeeze.dim: 1,
    _aten.squeeze.dims: 1,
    _aten.flip.default: 1,
    _aten.roll.default: 2,
}


@dataclass(eq=False)
class FewRows:
    """The ``chosen`` ones of the ``rows`` of one call of a pair of graphs, by ``symbol``.

    A row saves ``row_nbytes``, uncompressed. ``inputs`` are forward's, ``tangents`` backward's by name,
    ``squared_norm`` that of the whole batch's gradient; the last two are there once `keep_tangents` and `keep_results`
    were called. ``sums_rows``: tangents that have rows say something. ``links``: by input, the tangent of an earlier
    graph of the step that its gradient is.
    """

    pair: GraphPair
    analysis: GraphAnalysis
    symbol: RowSymbol
    rows: int
    chosen: range
    row_nbytes: float
    inputs: Sequence[Any]
    links: Mapping[int, Place] = field(default_factory=dict)
    tangents: dict[str, Any] = field(default_factory=dict)
    squared_norm: float = 0.0
    sums_rows: bool = False

    @classmethod
    def of(
        cls, pair: GraphPair, analysis: GraphAnalysis, inputs: Sequence[Any], like: "FewRows | None" = None
    ) -> "FewRows | None":
        """Copies of some rows of forward's ``inputs``; None where these have no rows that vary, or too few.

        The rows are those that are chosen of an earlier graph of the step, ``like``, if there is one.
        """
        nodes = pair.forward.graph.find_nodes(op="placeholder")
        varying = [(n, x) for n, x in zip(nodes, inputs, strict=True) if n.name not in pair.static_inputs]
        symbol = RowSymbol([n for n, _ in varying], [x for _, x in varying], None if like is None else like.rows)
        fakes = [node.meta.get("val") for node in nodes]
        is_apart = not any(has_collectives(module.graph) for module in (pair.forward, pair.backward))
        rows = symbol.rows(fakes, inputs) if symbol.is_known and is_apart else None
        if rows is None or (like is not None and rows != like.rows):
            return None
        nbytes = sum(tensor.nbytes for tensor in analysis.saved if tensor.owner == "nobody")
        least = max(FEWEST, math.ceil(rows * ENOUGH_NBYTES / max(nbytes, 1)))
        # Statistics of a batch norm may want more.
        counts = [count for count in (least, math.ceil(1.5 * least), 2 * least) if 2 * count <= rows]
        counts = counts if like is None else [like.few]
        few = next((count for count in counts if not are_tied(pair.forward.graph, symbol, count / rows)), None)
        if few is None:
            return None
        chosen = symbol.apart(rows, few)
        cut = [symbol.take(fake, value, rows, chosen) for fake, value in zip(fakes, inputs, strict=True)]
        # What has a history would hold it until the rows are measured. One tensor may be several inputs.
        without = {id(x): x.detach() for x in cut if isinstance(x, torch.Tensor) and not x.is_leaf}
        cut = [without.get(id(x), x) for x in cut]
        return cls(pair, analysis, symbol, rows, chosen, nbytes / rows, cut)

    @property
    def few(self) -> int:
        """How many rows are chosen."""
        return len(self.chosen)

    @property
    def own_inputs(self) -> list[Any]:
        """Forward's inputs, None for those that an earlier graph leads to."""
        return [None if position in self.links else x for position, x in enumerate(self.inputs)]

    @property
    def device_types(self) -> frozenset[str]:
        """Where the graphs run."""
        return frozenset(x.device.type for x in self.inputs if isinstance(x, torch.Tensor))

    def has_rows_apart(self, placeholder: fx.Node) -> bool:
        """Whether what ``placeholder`` of forward or backward stands for has the rows as a dimension of its own."""
        return self.symbol.is_apart_in(placeholder.meta["val"])

    def keep_tangents(self, arguments: Sequence[Any]) -> None:
        """Of the ``arguments`` of the whole batch's backward pass."""
        names, placeholders = self.pair.tangents(), self.pair.backward.graph.find_nodes(op="placeholder")
        for node, value in zip(placeholders, arguments, strict=True):
            if node.name in names:
                fake = node.meta.get("val")
                self.sums_rows |= self.symbol.is_in(fake) and isinstance(value, torch.Tensor) and bool(value.any())
                self.tangents[node.name] = self.symbol.take(fake, value, self.rows, self.chosen)

    def keep_results(self, results: Sequence[Any]) -> None:
        """Of the whole batch's backward pass."""
        self.squared_norm = sum(squared_norm(x) for x in results if _is_float(x))

    def can_be_parted(self, count: int) -> bool:
        """Whether the rows may run in ``count`` parts, one after the other: none depends on those of another part."""
        graphs = (self.pair.forward.graph, self.pair.backward.graph)
        if any(self._is_other_of_one_row(node) for graph in graphs for node in graph.nodes):
            return False
        return not are_tied(graphs[0], self.symbol, self.few / count / self.rows)

    def _is_other_of_one_row(self, node: fx.Node) -> bool:
        if node.target not in _OTHERS_OF_ONE_ROW:
            return False
        at, shape = _OTHERS_OF_ONE_ROW[node.target], node.all_input_nodes[0].meta["val"].shape
        given: Any = node.args[at] if at is not None and at < len(node.args) else range(len(shape))
        return any(self.symbol.is_in(shape[dim]) for dim in ([given] if isinstance(given, int) else given))

    def part(self, first: int, count: int) -> "FewRows":
        """Every ``count``-th of the few rows, from the ``first`` one on."""
        chosen = range(first, self.few, count)
        fakes = [node.meta.get("val") for node in self.pair.forward.graph.find_nodes(op="placeholder")]
        inputs = [self.symbol.take(fake, x, self.few, chosen) for fake, x in zip(fakes, self.inputs, strict=True)]
        placeholders = {node.name: node for node in self.pair.backward.graph.find_nodes(op="placeholder")}
        tangents = {
            name: self.symbol.take(placeholders[name].meta.get("val"), value, self.few, chosen)
            for name, value in self.tangents.items()
        }
        return replace(self, chosen=self.chosen[first::count], inputs=inputs, tangents=tangents)

    def run(self, numbers: dict[int, int]) -> tuple[Step, float | None]:
        """The backward pass of the rows, and their loss where forward gives one.

        ``numbers``: of leaves, by the ``id`` of the input; new ones are added.
        """
        pair = self._pair_of_few()
        with self._without_trace():
            outputs = interpret_graph(self.pair.forward)(_without_written(self.pair, self.inputs))
        given = {saved.placeholder.name: outputs[saved.position] for saved in self.pair.saved_values()}
        given.update(self.tangents)
        at = self._place_of_loss()
        loss = None if at is None else float(outputs[at])
        # What the model returns, such as logits, may be most of what there is.
        del outputs
        arguments = [given[node.name] for node in self.pair.backward.graph.find_nodes(op="placeholder")]
        leaves: dict[int, int] = {}
        flows: dict[int, Place] = {}
        for output, position in pair.gradients_of_inputs().items():
            if position in self.links:
                flows[output] = self.links[position]
            else:
                leaves[output] = numbers.setdefault(id(self.inputs[position]), len(numbers))
        return Step(pair, self.analysis, arguments, flows, leaves=leaves, outputs=[]), loss

    def _pair_of_few(self) -> GraphPair:
        """The same graphs, with backward's sizes as they are for the few rows."""
        nodes = self.pair.forward.graph.find_nodes(op="placeholder")
        known = known_symbols([node.meta.get("val") for node in nodes], self.inputs)
        backward = copy_module(self.pair.backward)
        for node in backward.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = tree_map(partial(with_symbols, known=known), node.meta["val"])
        return replace(self.pair, backward=backward)

    def checked_norm(self, step: Step) -> float:
        """The squared norm of the rows' gradient, whose backward pass is ``step``.

        Raises:
            ValueError: the rows have next to no gradient.
        """
        with torch.no_grad():
            found = sum(squared_norm(x) for _, x in Replay(step.backward, step.arguments).outputs({}) if _is_float(x))
        times = self.rows / self.few
        if not self.squared_norm / times**2 < SLACK * found < SLACK**2 * times * self.squared_norm:
            raise ValueError(f"their gradient has a squared norm of {found:.3g}, that of all {self.squared_norm:.3g}")
        return found

    def weight(self, few: float | None) -> float:
        """By how many times the variance of the whole batch's gradient is that of the rows', whose loss is ``few``.

        Errors of rows are independent. Where the gradient is their sum, as it is of tangents that have rows, the whole
        has ``rows / few`` times the variance; where it is their mean, so many times less. Which one a loss within the
        graph is, its value tells where every row is there twice.

        Raises:
            ValueError: that cannot be told.
        """
        times = self.rows / self.few
        if self.sums_rows:
            return times
        twice = self._loss_of_twice()
        share = twice / few if twice is not None and few else math.nan
        if 2**-0.5 < share < 2**0.5:
            return 1 / times
        if 2**0.5 < share < 2**1.5:
            return times
        raise ValueError(f"whether a loss of {few} is a mean or a sum, one of {twice} for twice the rows does not tell")

    def _loss_of_twice(self) -> float | None:
        """The loss of the rows when each of them is there twice; None where the graph has none."""
        at = self._place_of_loss()
        if at is None:
            return None
        forward = copy_module(self.pair.forward)
        output = forward.graph.output_node()
        results: Any = output.args[0]
        # Without the rest nothing is held for backward.
        output.args = ((results[at],),)
        forward.graph.eliminate_dead_code()
        fakes = [node.meta.get("val") for node in forward.graph.find_nodes(op="placeholder")]
        inputs = _without_written(self.pair, self.inputs)
        given = [self.symbol.repeat(fake, x, self.few) for fake, x in zip(fakes, inputs, strict=True)]
        with self._without_trace():
            return float(interpret_graph(forward)(given)[0])

    def _place_of_loss(self) -> int | None:
        """Which of forward's results is the first number, None where there is none."""
        results = enumerate(self.pair.forward_outputs[: self.pair.num_user_outputs])
        return next((at for at, x in results if isinstance(x, fx.Node) and _is_number(x.meta.get("val"))), None)

    @contextlib.contextmanager
    def _without_trace(self) -> Iterator[None]:
        """Graphs run without autograd, and the caller's random numbers stay as they were."""
        devices = {x.device.index for x in self.inputs if isinstance(x, torch.Tensor) and x.is_cuda}
        with torch.no_grad(), torch.random.fork_rng(sorted(devices)):
            yield


def _without_written(pair: GraphPair, inputs: Sequence[Any]) -> list[Any]:
    """Forward's ``inputs`` with copies of those that it writes to."""
    written = {user.args[0] for user in pair.forward.graph.find_nodes(op="call_function", target=_aten.copy_.default)}
    nodes = pair.forward.graph.find_nodes(op="placeholder")
    return [x.clone() if node in written else x for node, x in zip(nodes, inputs, strict=True)]


def _is_number(x: Any) -> bool:
    return is_float_tensor(x) and all(not is_symbolic(size) and size == 1 for size in x.shape)


def _is_float(x: object) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
