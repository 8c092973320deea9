"""The tape of one training step: which graphs ran, on what, and where the gradient of each one's inputs flows on to."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from gact_fx.breaks.eager_vjp import EagerVJP, Entry, follow
from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.operators import has_collectives
from gact_fx.graphs.tensors import Identity, identity, version
from gact_fx.passes.graph_analysis import GraphAnalysis

# The index of a step, and the name of one of its tensors or tangents.
Place = tuple[int, str]
# Calls of a model in which a graph runs forward, and which may wait for their backward passes.
MAX_WAITING = 8


@dataclass(frozen=True)
class Step:
    """One graph's backward pass in a training step.

    ``pair`` has the rewritten graphs, and ``arguments`` are the inputs of its backward graph in the order of the
    placeholders: blobs, what was kept, and tangents. ``flows`` maps a backward output (the gradient of an input) to the
    earlier step that computed this input and the name of that step's tangent; ``detours``, where eager PyTorch computed
    the input, to what happens to the gradient there, whose ends are such places, or leaves. ``leaves``, by backward
    output, are the leaves whose gradients these are, numbered within the training step. ``outputs`` are what backward
    gave; there are none where somebody has written to them since, and it is None where they were not kept. ``weight``:
    by how many times the training step's variance is that of this backward pass, which may be of a few of its rows.
    """

    pair: GraphPair
    analysis: GraphAnalysis
    arguments: Sequence[Any]
    flows: Mapping[int, Place] = field(default_factory=dict)
    detours: Mapping[int, EagerVJP] = field(default_factory=dict)
    leaves: Mapping[int, int] = field(default_factory=dict)
    outputs: Sequence[Any] | None = None
    weight: float = 1.0

    def onward(self, position: int, gradient: torch.Tensor) -> list[tuple[Place | None, Hashable, torch.Tensor]]:
        """What a backward output is, or is part of: the gradients of tangents of earlier steps, and of leaves.

        These are identified where other outputs may give them other parts.
        """
        if position not in self.detours:
            return [(self.flows.get(position), self.leaf(position), gradient)]
        detour = self.detours[position]
        parts = zip(detour.ends, detour(gradient), strict=True)
        return [(None, end.of, part) if end.is_leaf else (end.of, None, part) for end, part in parts]

    def ends(self, outputs: Sequence[Any]) -> list[torch.Tensor]:
        """The gradients among backward's outputs that no other graph goes on with."""
        goes_on = self.flows.keys() | self.detours.keys()
        return [x for at, x in enumerate(outputs) if isinstance(x, torch.Tensor) and at not in goes_on]

    def leaf(self, position: int) -> Hashable:
        """What identifies the leaf whose gradient a backward output is, None where that is not known."""
        return ("leaf", self.leaves[position]) if position in self.leaves else None

    @property
    def backward(self) -> fx.GraphModule:
        return self.pair.backward

    @property
    def readings(self) -> dict[str, str]:
        """Names of the backward nodes with the values of quantized tensors, in memory order → names of the tensors.

        These are what is decompressed, and quantized tensors that the plan keeps exact and backward reads.
        """
        found = {}
        names = {tensor.name for tensor, _ in self.analysis.quantized()}
        for placeholder in self.backward.graph.find_nodes(op="placeholder"):
            if placeholder.name not in names or not placeholder.users:
                continue
            loads = [user for user in placeholder.users if user.target is torch.ops.gact_fx.decompress.default]
            values = [load for load in loads if load.meta["val"].dtype.is_floating_point]
            found.update({node.name: placeholder.name for node in (values if loads else [placeholder])})
        return found

    @property
    def with_poles(self) -> frozenset[str]:
        """Names of the tensors of which some values lead to what is not finite, for all that is known."""
        return frozenset(how.name for _, how in self.analysis.quantized() if how.bends and not how.is_tame)

    @property
    def has_collectives(self) -> bool:
        """Whether running backward takes other ranks."""
        return has_collectives(self.backward.graph)

    @property
    def is_finite(self) -> bool:
        """Whether the tangents are free of NaN and infinity."""
        placeholders = self.backward.graph.find_nodes(op="placeholder")
        arguments = {node.name: value for node, value in zip(placeholders, self.arguments, strict=True)}
        tangents = [arguments[name] for name in self.pair.tangents()]
        return all(bool(value.isfinite().all()) for value in tangents if isinstance(value, torch.Tensor))


def with_copies(pair: GraphPair, analysis: GraphAnalysis, arguments: Sequence[Any]) -> list[Any]:
    """The arguments of a backward graph with parameters, and what shares their memory, copied."""
    parameters = {tensor.name for tensor in analysis.saved if tensor.owner == "parameter"}
    placeholders = pair.backward.graph.find_nodes(op="placeholder")
    return [
        value.clone() if placeholder.name in parameters else value
        for placeholder, value in zip(placeholders, arguments, strict=True)
    ]


@dataclass(eq=False)
class _Call:
    """One forward call; the tensors are held so that no other tensor can take their addresses.

    ``made`` identifies the outputs as they were in this call. ``sources`` says of the activations among the inputs, by
    position, which call made them, and as which of its outputs, or what eager PyTorch computed them by; None where that
    is not known.
    """

    graph: Hashable
    inputs: list[Any]
    outputs: list[Any]
    made: dict[int, Identity]
    sources: "dict[int, tuple[_Call, int] | EagerVJP | None]"
    step: tuple[GraphPair, GraphAnalysis, list[Any]] | None = None
    # What backward gave, with the versions that these tensors had.
    results: list[tuple[Any, int]] | None = None

    def gradients(self) -> list[Any] | None:
        """Backward's outputs as `Step` has them; what became .grad may have been added to in place."""
        if self.results is None:
            return None
        is_same = all(not _is_tensor(x) or version(x) == was for x, was in self.results)
        return [x for x, _ in self.results] if is_same else []


class Tape:
    """Records forward and backward calls of a step's graphs, and gives the steps with the flows between them.

    ``follows``: also through eager PyTorch. Otherwise what lies in a result's place, as it was, is taken for it.
    """

    def __init__(self, *, follows: bool = True) -> None:
        self._calls: list[_Call] = []
        self._follows = follows

    @property
    def is_empty(self) -> bool:
        """Whether no graph has run forward."""
        return not self._calls

    def record_forward(self, graph: Hashable, inputs: Sequence[Any], outputs: Sequence[Any], calls: int = 1) -> None:
        """``graph`` identifies the compiled graph, which a model ``calls`` so often; ``outputs`` are user outputs."""
        waiting = [call for call in self._calls if call.graph == graph and call.step is None]
        if len(waiting) >= MAX_WAITING * calls:
            # Forward passes that nobody differentiates (validation without no_grad) must not pile up.
            self._calls.remove(waiting[0])
        activations = {i: x for i, x in enumerate(inputs) if has_history(x)}
        sources = self._sources(activations)
        made = {i: identity(x) for i, x in enumerate(outputs) if _is_tensor(x)}
        self._calls.append(_Call(graph, list(inputs), list(outputs), made, sources))

    def _sources(self, activations: Mapping[int, Any]) -> dict[int, tuple[_Call, int] | EagerVJP | None]:
        entries: dict[Entry, tuple[_Call, int]] = {}
        places: dict[Identity, tuple[_Call, int]] = {}
        for call in self._calls:
            for position, was in call.made.items():
                x = call.outputs[position]
                places[was] = call, position
                # Written to since, autograd says of it what made the new value.
                if x.grad_fn is not None and identity(x) == was:
                    entries[x.grad_fn, x.output_nr] = call, position
        found: dict[int, tuple[_Call, int] | EagerVJP | None] = {}
        for position, x in activations.items():
            found[position] = entries.get((x.grad_fn, x.output_nr))
            if found[position] is None:
                # AOTAutograd may return another tensor in its result's place, as it does for views.
                is_result = x.grad_fn.name() == "CompiledFunctionBackward"
                found[position] = places.get(identity(x)) if is_result or not self._follows else follow(x, entries)
        return found

    def record_backward(
        self, graph: Hashable, pair: GraphPair, analysis: GraphAnalysis, arguments: Sequence[Any]
    ) -> list[Any]:
        """Attach a backward pass to the latest forward call of its graph that has none: autograd runs in reverse.

        Returns this call's inputs, none where it was not recorded.
        """
        for call in reversed(self._calls):
            if call.graph == graph and call.step is None:
                call.step = (pair, analysis, list(arguments))
                return call.inputs
        return []

    def record_results(self, graph: Hashable, results: Sequence[Any]) -> None:
        """What the backward pass gave that was attached last to a call of ``graph``.

        Whole gradients of sharded parameters are not kept.
        """
        for call in self._calls if self._follows else ():
            if call.graph == graph and call.step is not None and call.results is None:
                detached = (x.detach() if isinstance(x, torch.Tensor) else x for x in results)
                call.results = [(x, version(x) if isinstance(x, torch.Tensor) else 0) for x in detached]
                return

    def breaks(self) -> list[str]:
        """In words, the activations that a graph gives a gradient which cannot be followed to the graphs before it."""
        return [
            f"graph {index} reads the {tuple(x.shape)} result of {x.grad_fn.name()}"
            for index, call in enumerate(self._calls)
            for x in (call.inputs[position] for position, source in call.sources.items() if source is None)
            if index and call.step is not None
        ]

    def steps(self) -> list[Step]:
        """The graphs that ran backward, in forward's order."""
        calls = [call for call in self._calls if call.step is not None]
        places: dict[Any, Place] = {}
        numbers: dict[torch.Tensor, int] = {}
        steps = []
        for index, call in enumerate(calls):
            assert call.step is not None
            pair, analysis, arguments = call.step
            flows, detours, leaves = {}, {}, {}
            for output, position in pair.gradients_of_inputs().items():
                source, given = call.sources.get(position), call.inputs[position]
                if isinstance(source, EagerVJP):
                    detours[output] = source.towards(places)
                elif source in places:
                    flows[output] = places[source]
                elif isinstance(given, torch.Tensor) and given.is_leaf:
                    # By these numbers, the same in every run, something is drawn.
                    leaves[output] = numbers.setdefault(given, len(numbers))
            steps.append(Step(pair, analysis, arguments, flows, detours, leaves, call.gradients()))
            for position, tangent in pair.tangents_of_outputs().items():
                places[call, position] = index, tangent
        return steps


def has_history(value: Any) -> bool:
    """Whether a gradient goes on from ``value`` to what computed it."""
    return _is_tensor(value) and value.requires_grad and not value.is_leaf


def _is_tensor(value: Any) -> bool:
    """Whether it has an address that nothing else has."""
    return isinstance(value, torch.Tensor) and value.numel() > 0
