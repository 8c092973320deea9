"""Measure what a plan's codes do to the gradient all together, on a recorded step.

Predictions are made tensor by tensor. Where several rounded tensors meet in a quotient or a product their errors
multiply, and only both together show it.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch

from gact_fx.codec import operators
from gact_fx.codec.code import Code
from gact_fx.graphs.replay import Replay
from gact_fx.passes.encodings import Quantize
from gact_fx.passes.graph_analysis import GraphAnalysis
from gact_fx.passes.merge_masks import Stopped
from gact_fx.plan import GraphPlan, Plan, TensorPlan, graph_fingerprint, tensor_seed
from gact_fx.profiling.gradient_changes import GradientChanges, compared, difference
from gact_fx.profiling.gradients import squared_norm
from gact_fx.profiling.stopped_elements import StoppedElements
from gact_fx.profiling.tape import Place, Step

# Elements from which on one draw of noise says enough.
ENOUGH = 2**18
MOST_DRAWS = 4
# A gradient of so many elements differs little from draw to draw.
FEW = 2**10
# Between 1 and 2.
_SCALES = 2**20
Given = dict[str, Callable[[], torch.Tensor]]


class PlanMeter:
    """The backward passes of one training step, to be run with a plan's codes in the place of what was recorded."""

    def __init__(self, steps: Sequence[Step], seed: int = 0) -> None:
        self._graphs = [_Graph(step, seed) for step in steps]
        self._steps = steps
        numel = sum(tensor.numel for step in steps for tensor, _ in step.analysis.quantized())
        self._draws = max(1, min(MOST_DRAWS, ENOUGH // max(numel, 1)))
        self._exact: list[dict[int, Any]] = []
        self._numel, self.squared_norm = 0, 0.0
        for graph, step in zip(self._graphs, steps, strict=True):
            goes_on = step.flows.keys() | step.detours.keys()
            self._exact.append({})
            for position, x in enumerate(step.outputs) if step.outputs else graph.replay.outputs({}):
                if isinstance(x, torch.Tensor) and position not in goes_on:
                    self._numel += x.numel()
                    self.squared_norm += squared_norm(x)
                self._exact[-1][position] = compared(step, position, x)

    def squared_error(self, plan: Plan, without: AbstractSet[Place] = frozenset()) -> float:
        """The squared distance to the recorded gradient, the mean over draws; ``without`` what stays as recorded."""
        return sum(self._drawn(plan, draw, without) for draw in range(self._draws)) / self._draws

    def largest_error(self, plan: Plan) -> float:
        """The largest squared distance of several draws; more of a gradient that has few elements."""
        draws = MOST_DRAWS if self._numel > FEW else 2 * MOST_DRAWS
        return max(self._drawn(plan, draw, frozenset()) for draw in range(draws))

    def _drawn(self, plan: Plan, draw: int, without: AbstractSet[Place]) -> float:
        changes = GradientChanges(self._steps)
        # Gradients flow from late graphs to early ones.
        for index in reversed(range(len(self._graphs))):
            graph = self._graphs[index]
            given: dict[str, Any] = graph.rounded(plan, draw, {name for at, name in without if at == index})
            for name, change in changes.waiting.pop(index, {}).items():
                arrived = graph.replay.inputs[name]
                given[name] = arrived + change.reshape(arrived.shape).to(arrived.dtype)
            # One gradient after the other: all of them would take as much memory as the parameters.
            for position, value in graph.replay.outputs(given) if given else ():
                kept = compared(self._steps[index], position, value)
                changes.add_one(index, position, difference(kept, self._exact[index][position]))
        return changes.squared_norm()


def _graph_of(plan: Plan, analysis: GraphAnalysis) -> GraphPlan:
    found = plan.graph(graph_fingerprint(analysis.saved))
    assert found is not None
    return found


class _Graph:
    """One graph's backward pass."""

    def __init__(self, step: Step, seed: int) -> None:
        self.replay = Replay(step.backward, step.arguments)
        self._analysis, self._seed = step.analysis, seed
        self._names = {node.name for node in step.backward.graph.nodes}
        self._readings = {tensor: node for node, tensor in step.readings.items()}
        self._find_stopped = StoppedElements(step)

    def rounded(self, plan: Plan, draw: int, without: AbstractSet[str]) -> Given:
        """Backward's nodes, by name, with the values that they have if all but ``without`` is stored by the plan."""
        graph = _graph_of(plan, self._analysis)
        entries = graph.entries()
        given: Given = {}
        for tensor, how in self._analysis.quantized():
            entry = entries[tensor.key]
            if entry.code is not None and tensor.name in self._readings and tensor.name not in without:
                # As in training, what is the same in two runs of a graph has the same codes.
                seed = tensor_seed(self._seed, f"joint {draw} {graph.fingerprint}", tensor.key)
                given.update(self._of(how, entry, replace(entry.code, seed=seed)))
        return given

    def _of(self, how: Quantize, entry: TensorPlan, code: Code) -> Given:
        reading = self._readings[how.name]
        if entry.stored == "coefficients":
            assert how.coefficients is not None
            masks = how.coefficients.masks
            names = [name if name != how.name else reading for name in how.coefficients.nodes]
            # What is stored for another tensor, too, is read from there.
            given = self._coefficients([name for name in names if name in self._names], code)
        else:
            masks = how.bare().masks if entry.stored == "bare" else how.masks
            given = {reading: partial(self._values, reading, code, entry.merged)}
        # Decisions are those that were taken of the recorded values.
        return given | {name: partial(self._recorded, name) for name in masks if name in self._names}

    def _recorded(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self.replay.evaluate({name})[name]
        return found

    def _values(self, reading: str, code: Code, is_merged: bool) -> torch.Tensor:
        values = self._recorded(reading)
        stopped = self._find_stopped(reading, values) if is_merged else None
        return _coded(values, code, stopped)

    def _coefficients(self, names: Sequence[str], code: Code) -> Given:
        @cache
        def decoded() -> list[torch.Tensor]:
            recorded = self.replay.evaluate(names)
            parts = [recorded[name] for name in names]
            shapes, ends = [part.shape for part in parts], list(accumulate(part.numel() for part in parts))
            flat = torch.cat([part.reshape(-1) for part in parts]) if len(parts) > 1 else parts[0].reshape(-1)
            # They may be the largest tensors that there are.
            recorded.clear()
            parts.clear()
            flat = _coded(flat, code, None)
            pieces = (flat[start:end] for start, end in zip([0, *ends], ends, strict=False))
            return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

        return {name: lambda at=at: decoded()[at] for at, name in enumerate(names)}  # type: ignore[misc]


def _coded(values: torch.Tensor, code: Code, stopped: Stopped | None) -> torch.Tensor:
    """``values`` as codes give them back, which tell what is ``stopped`` as well.

    Their scale is drawn, too: on its own, a value that counts for most may be a code by luck.
    """
    scale = 2 ** (code.seed % _SCALES / _SCALES)
    memory = tuple(range(values.dim()))
    order = code.order_of(memory)
    if code.per_channel and values.dim() > 1:
        # A few rows have fewer elements of a channel: groups of several channels would have another error.
        code = code.within(values.numel() // values.shape[-1])
    scaled = (scale * (values.float() if values.element_size() < 4 else values)).permute(order)
    if stopped is not None:
        scaled = scaled.masked_fill(stopped.mask.view(values.shape).permute(order), float("nan"))
    blob, shape, dtype = operators.compress(scaled, *code.to_compress()), scaled.shape, scaled.dtype
    del scaled
    found = operators.decompress(blob, shape, dtype, *code.to_decompress())
    found = found.div_(scale).to(values.dtype).permute(sorted(memory, key=order.__getitem__)).contiguous()
    if stopped is None:
        return found
    filled = torch.zeros_like(values) if stopped.error is None else values + stopped.error.view(values.shape)
    return torch.where(stopped.mask.view(values.shape), filled, found)
