"""How often each compiled graph runs in a training step: as many copies of its activations are held at once."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gact_fx.breaks.eager_regions import EagerRegions
from gact_fx.breaks.forward_pass import EagerTensor
from gact_fx.graphs.compilers import Compiled, boxed
from gact_fx.graphs.dynamo import in_backward
from gact_fx.graphs.tensors import storage_key
from gact_fx.passes.graph_analysis import held_nbytes, is_counted
from gact_fx.profiling.tape import MAX_WAITING
from gact_fx.training.rewrite import RewrittenGraph

# Of a graph whose sizes vary, the bytes of so many runs are remembered; of more in one step, these stand for all.
_MOST_REMEMBERED = 1024


@dataclass(frozen=True)
class GraphRuns:
    """How often one graph ran in a training step, and what its runs held, as a share of what it holds as traced.

    ``scale`` is 1 but for graphs whose sizes vary.
    """

    runs: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class StepRuns:
    """The graphs that one training step ran, and what eager PyTorch saved between them."""

    graphs: Mapping[RewrittenGraph, GraphRuns] = field(default_factory=dict)
    eager: tuple[EagerTensor, ...] = ()


class RunCounts:
    """Counts the runs of graphs, and remembers the last training step and the largest one.

    A step ends where forward follows on backward, outside of it: what checkpointing runs forward again in backward
    belongs to the same step. Forward passes without a backward pass hold nothing for long, and do not count.
    """

    def __init__(self, regions: EagerRegions | None = None) -> None:
        self._regions = regions
        self._has_run_backward = False
        self._forwards: Counter[RewrittenGraph] = Counter()
        self._backwards: Counter[RewrittenGraph] = Counter()
        self._nominal: dict[RewrittenGraph, int] = {}
        # Bytes that the latest runs of graphs with varying sizes saved.
        self._saved: dict[RewrittenGraph, deque[int]] = {}
        self._last = StepRuns()
        self._largest = StepRuns()
        self._peak: int | None = None

    def forward(self, run: Compiled, graph: RewrittenGraph) -> Compiled:
        """``run``, the forward pass of ``graph``, counted."""
        self._nominal[graph] = held_nbytes(graph.analysis, graph.plan.entries())
        varies = any(tensor.dynamic for tensor in graph.analysis.saved)

        def call(arguments: list[Any]) -> Any:
            if self._has_run_backward and not in_backward():
                self._end_step()
            self._forwards[graph] += 1
            outputs = run(arguments)
            if varies:
                saved = self._saved.setdefault(graph, deque(maxlen=_MOST_REMEMBERED))
                saved.append(_saved_nbytes(graph, outputs))
            return outputs

        return boxed(call)

    def backward(self, run: Compiled, graph: RewrittenGraph) -> Compiled:
        """``run``, the backward pass of ``graph``, counted."""

        def call(arguments: list[Any]) -> Any:
            self._has_run_backward = True
            self._backwards[graph] += 1
            return run(arguments)

        return boxed(call)

    @property
    def peak(self) -> int | None:
        """The most bytes that the latest step under a meter had live at a time; None where none was."""
        return self._peak

    def note_peak(self, nbytes: int | None) -> None:
        """Take note of what a meter found."""
        self._peak = nbytes

    def last_step(self) -> StepRuns:
        """The latest step that ran backward; before the first one, the forward passes so far; empty if there are none.

        Where backward is out of sight, every graph that ran counts once.
        """
        if self._backwards:
            return self._step(self._backwards)
        if self._last.graphs:
            return self._last
        return self._step(Counter(self._forwards.keys()) if self.backward_is_unseen else self._forwards)

    def largest_step(self) -> StepRuns:
        """The step that held most for backward, the first one of several that held as much."""
        last = self.last_step()
        return self._largest if self._nbytes(self._largest) >= self._nbytes(last) else last

    @property
    def backward_is_unseen(self) -> bool:
        """Whether graphs run forward time and again and never backward: compiled autograd does that without them."""
        has_seen_any = self._last.graphs or self._backwards
        calls = (count / graph.pair.repeats.calls for graph, count in self._forwards.items())
        return not has_seen_any and max(calls, default=0) > MAX_WAITING

    def _end_step(self) -> None:
        self._largest = self.largest_step()
        self._last = self._step(self._backwards)
        self._has_run_backward = False
        self._forwards.clear()
        self._backwards.clear()
        self._saved.clear()

    def _step(self, runs: Counter[RewrittenGraph]) -> StepRuns:
        graphs = {graph: GraphRuns(count, self._scale(graph, count)) for graph, count in runs.items()}
        return StepRuns(graphs, () if self._regions is None else self._regions.latest_planned)

    def _scale(self, graph: RewrittenGraph, count: int) -> float:
        """What the latest ``count`` runs saved, as a share of what the graph saves as it was traced."""
        saved = list(self._saved.get(graph, ()))[-count:]
        nominal = self._nominal[graph]
        return sum(saved) / len(saved) / nominal if saved and nominal else 1.0

    def _nbytes(self, step: StepRuns) -> float:
        held = sum(found.runs * found.scale * self._nominal[graph] for graph, found in step.graphs.items())
        return held + sum(tensor.bytes_after for tensor in step.eager)


def _saved_nbytes(graph: RewrittenGraph, outputs: Sequence[Any]) -> int:
    """Bytes of what one run of forward saved for backward, as `held_nbytes` counts them."""
    saved = outputs[graph.pair.num_user_outputs :]
    pairs = zip(graph.analysis.saved, saved, strict=False)
    counted = [x for tensor, x in pairs if is_counted(tensor) and isinstance(x, torch.Tensor)]
    return sum({storage_key(x): x.untyped_storage().nbytes() for x in counted}.values())
