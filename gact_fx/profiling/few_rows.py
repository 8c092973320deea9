"""A few rows of a batch stand for all of them: what is measured on these takes so much less memory.

The step itself runs on the whole batch. Of it a few rows of what forward reads and of the tangents are kept, and when
backward has ended the same graphs run on these, whose rows were traced as a size that varies.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
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
from gact_fx.profiling.tape import Step
from gact_fx.profiling.tied_rows import are_tied

# The fewest rows that are measured, and the bytes that these save, uncompressed: of fewer, figures scatter.
FEWEST = 2
ENOUGH_NBYTES = 2**23
# By how many times the gradient of a few rows may be larger or smaller than sums and means explain.
SLACK = 30.0


@dataclass(eq=False)
class FewRows:
    """A ``few`` of the ``rows`` of one call of a pair of graphs, by ``symbol``.

    ``inputs`` are forward's, ``tangents`` backward's by name, ``squared_norm`` that of the whole batch's gradient; the
    last two are there once `keep_tangents` and `keep_results` were called. ``sums_rows``: tangents that have rows say
    something.
    """

    pair: GraphPair
    analysis: GraphAnalysis
    symbol: RowSymbol
    rows: int
    few: int
    inputs: Sequence[Any]
    tangents: dict[str, Any] = field(default_factory=dict)
    squared_norm: float = 0.0
    sums_rows: bool = False

    @classmethod
    def of(cls, pair: GraphPair, analysis: GraphAnalysis, inputs: Sequence[Any]) -> "FewRows | None":
        """Copies of some rows of forward's ``inputs``; None where these have no rows that vary, or too few."""
        nodes = pair.forward.graph.find_nodes(op="placeholder")
        varying = [node for node in nodes if node.name not in pair.static_inputs]
        symbol = RowSymbol(varying)
        fakes = [node.meta.get("val") for node in nodes]
        is_apart = not any(has_collectives(module.graph) for module in (pair.forward, pair.backward))
        rows = symbol.rows(fakes, inputs) if symbol.is_known and is_apart else None
        if rows is None:
            return None
        nbytes = sum(tensor.nbytes for tensor in analysis.saved if tensor.owner == "nobody")
        least = max(FEWEST, math.ceil(rows * ENOUGH_NBYTES / max(nbytes, 1)))
        # Statistics of a batch norm may want more.
        counts = (count for count in (least, math.ceil(1.5 * least), 2 * least) if 2 * count <= rows)
        few = next((count for count in counts if not are_tied(pair.forward.graph, symbol, count / rows)), None)
        if few is None:
            return None
        written = {user.args[0] for user in pair.forward.graph.find_nodes(op="call_function", target=_COPY)}
        cut = [symbol.cut(fake, value, rows, few) for fake, value in zip(fakes, inputs, strict=True)]
        # What has a history would hold it until the rows are measured. One tensor may be several inputs.
        without = {id(x): x.detach() for x in cut if isinstance(x, torch.Tensor) and not x.is_leaf}
        cut = [without.get(id(x), x) for x in cut]
        kept = [x.clone() if node in written else x for node, x in zip(nodes, cut, strict=True)]
        return cls(pair, analysis, symbol, rows, few, kept)

    @property
    def device_types(self) -> frozenset[str]:
        """Where the graphs run."""
        return frozenset(x.device.type for x in self.inputs if isinstance(x, torch.Tensor))

    def keep_tangents(self, arguments: Sequence[Any]) -> None:
        """Of the ``arguments`` of the whole batch's backward pass."""
        names, placeholders = self.pair.tangents(), self.pair.backward.graph.find_nodes(op="placeholder")
        for node, value in zip(placeholders, arguments, strict=True):
            if node.name in names:
                fake = node.meta.get("val")
                self.sums_rows |= self.symbol.is_in(fake) and isinstance(value, torch.Tensor) and bool(value.any())
                self.tangents[node.name] = self.symbol.cut(node.meta.get("val"), value, self.rows, self.few)

    def keep_results(self, results: Sequence[Any]) -> None:
        """Of the whole batch's backward pass."""
        self.squared_norm = sum(squared_norm(x) for x in results if _is_float(x))

    def step(self) -> Step:
        """Run forward on the rows; the step knows what share of the whole batch's variance theirs is."""
        pair = self._pair_of_few()
        with self._without_trace():
            outputs = interpret_graph(self.pair.forward)(list(self.inputs))
        given = {saved.placeholder.name: outputs[saved.position] for saved in self.pair.saved_values()}
        given.update(self.tangents)
        loss = next((float(x) for x in outputs[: self.pair.num_user_outputs] if _is_number(x)), None)
        # What the model returns, such as logits, may be most of what there is.
        del outputs
        arguments = [given[node.name] for node in self.pair.backward.graph.find_nodes(op="placeholder")]
        leaves: dict[int, int] = {}
        numbers: dict[int, int] = {}
        for output, position in pair.gradients_of_inputs().items():
            leaves[output] = numbers.setdefault(id(self.inputs[position]), len(numbers))
        step = Step(pair, self.analysis, arguments, leaves=leaves, outputs=[])
        return replace(step, weight=self._weight(step, loss))

    def _pair_of_few(self) -> GraphPair:
        """The same graphs, with backward's sizes as they are for the few rows."""
        nodes = self.pair.forward.graph.find_nodes(op="placeholder")
        known = known_symbols([node.meta.get("val") for node in nodes], self.inputs)
        backward = copy_module(self.pair.backward)
        for node in backward.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = tree_map(partial(with_symbols, known=known), node.meta["val"])
        return replace(self.pair, backward=backward)

    def _weight(self, step: Step, few: float | None) -> float:
        """By how many times the variance of the whole batch's gradient is that of the rows', whose loss is ``few``.

        Errors of rows are independent. Where the gradient is their sum, as it is of tangents that have rows, the whole
        has ``rows / few`` times the variance; where it is their mean, so many times less. Which one a loss within the
        graph is, its value tells where every row is there twice.

        Raises:
            ValueError: that cannot be told, or the rows have next to no gradient.
        """
        with torch.no_grad():
            found = sum(squared_norm(x) for _, x in Replay(step.backward, step.arguments).outputs({}) if _is_float(x))
        times = self.rows / self.few
        if not self.squared_norm / times**2 < SLACK * found < SLACK**2 * times * self.squared_norm:
            raise ValueError(f"their gradient has a squared norm of {found:.3g}, that of all {self.squared_norm:.3g}")
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
        forward = copy_module(self.pair.forward)
        output = forward.graph.output_node()
        results: Sequence[Any] = output.args[0]  # type: ignore[assignment]
        nodes = [node for node in results[: self.pair.num_user_outputs] if isinstance(node, fx.Node)]
        numbers = [node for node in nodes if _is_number(node.meta.get("val"))]
        if not numbers:
            return None
        # Without the rest nothing is held for backward.
        output.args = (tuple(numbers[:1]),)
        forward.graph.eliminate_dead_code()
        fakes = [node.meta.get("val") for node in forward.graph.find_nodes(op="placeholder")]
        given = [self.symbol.repeat(fake, x, self.few) for fake, x in zip(fakes, self.inputs, strict=True)]
        with self._without_trace():
            return float(interpret_graph(forward)(given)[0])

    @contextlib.contextmanager
    def _without_trace(self) -> Iterator[None]:
        """Graphs run without autograd, and the caller's random numbers stay as they were."""
        devices = {x.device.index for x in self.inputs if isinstance(x, torch.Tensor) and x.is_cuda}
        with torch.no_grad(), torch.random.fork_rng(sorted(devices)):
            yield


def _is_number(x: Any) -> bool:
    return is_float_tensor(x) and all(not is_symbolic(size) and size == 1 for size in x.shape)


_COPY = torch.ops.aten.copy_.default


def _is_float(x: object) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
