"""What a step of training has in memory, call by call: pairs of graphs one after another, as they run.

Parameters, and what the caller gave, are left out. Gradients count apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.live_memory import Span, lifetimes, storages
from gact_fx.graphs.module_names import module_path


@dataclass(frozen=True)
class Buffer:
    """Memory that is live from call ``start`` to call ``end``, both included; ``op`` in ``module`` made it.

    ``slots`` names the saved values that lie in it, which forward's call ``left`` reads last, and backward's call
    ``wanted`` first; ``is_gradient`` says that it is a gradient of what the caller gave.
    """

    start: int
    end: int
    nbytes: int
    op: str
    module: str
    slots: tuple[str, ...] = ()
    left: int = 0
    wanted: int = 0
    is_gradient: bool = False


@dataclass(frozen=True)
class PairMemory:
    """The buffers of one pair: forward's calls are 0 to ``forward`` - 1, the ``backward`` ones follow on them.

    ``is_tied``: all runs of a step read the same parameters, and their gradients are added up.
    """

    forward: int = 0
    backward: int = 0
    buffers: tuple[Buffer, ...] = ()
    is_tied: bool = True

    @property
    def held(self) -> int:
        """Bytes that are held for backward when forward ends."""
        return sum(b.nbytes for b in self.buffers if b.slots)

    @property
    def activations(self) -> int:
        """The most bytes that are live at a time where nothing else runs, gradients left out."""
        return StepMemory.of([self], [1]).activations


@dataclass(frozen=True)
class StepMemory:
    """The buffers of one step of ``length`` calls, of which the first ``forward`` are forward's."""

    length: int = 0
    forward: int = 0
    buffers: tuple[Buffer, ...] = ()

    @classmethod
    def of(cls, pairs: Sequence[PairMemory], runs: Sequence[int], between: int = 0) -> "StepMemory":
        """The step in which each of ``pairs`` runs forward as often as ``runs`` says, and then all run backward in
        reverse.

        What a pair returns counts until its forward pass ends, and where another pair gets it, with that one.
        ``between`` bytes lie there throughout: what eager PyTorch saves between graphs.
        """
        order = [index for index, count in enumerate(runs) for _ in range(count)]
        forward = sum(pairs[index].forward for index in order)
        length = forward + sum(pairs[index].backward for index in order)
        found = [Buffer(0, length - 1, between, "", "")] if between and length else []
        start, turn = 0, length
        for place, index in enumerate(order):
            pair = pairs[index]
            turn -= pair.backward
            for b in pair.buffers:
                at, until = (start + w if w < pair.forward else turn + w - pair.forward for w in (b.start, b.end))
                # Backward begins with the last run; gradients of tied ones are added to that one's, and gone then.
                stays = b.is_gradient and not (pair.is_tied and index in order[place + 1 :])
                found.append(replace(b, start=at, end=length - 1 if stays else until, is_gradient=stays))
            start += pair.forward
        return cls(length, forward, tuple(found))

    def levels(self, *, gradients: bool = False) -> list[int]:
        """The bytes that are live at each call, those of ``gradients`` included or not."""
        changes = [0] * (self.length + 1)
        for b in self.buffers:
            if gradients or not b.is_gradient:
                changes[b.start] += b.nbytes
                changes[b.end + 1] -= b.nbytes
        return list(accumulate(changes))[: self.length]

    @cached_property
    def activations(self) -> int:
        """The most bytes that are live at a time, gradients left out."""
        return max(self.levels(), default=0)

    @cached_property
    def held(self) -> int:
        """Bytes that are held for backward when forward ends."""
        return sum(b.nbytes for b in self.buffers if b.start < self.forward <= b.end)

    @cached_property
    def peak(self) -> int:
        """The most bytes that are live at a time, gradients included."""
        return max(self.levels(gradients=True), default=0)

    @cached_property
    def gradients(self) -> int:
        """The bytes of the gradients that the step leaves."""
        return sum(b.nbytes for b in self.buffers if b.is_gradient)

    def largest_moment(self) -> tuple[list[Buffer], list[Buffer]]:
        """When most activations are live: those that wait for backward then, and all others, the largest first."""
        levels = self.levels()
        when = max(range(self.length), key=levels.__getitem__, default=0)
        live = [b for b in self.buffers if b.start <= when <= b.end and not b.is_gradient]
        waiting = [b for b in live if b.start < self.forward <= b.end]
        others = [b for b in live if not b.start < self.forward <= b.end]
        return waiting, sorted(others, key=lambda b: -b.nbytes)


# Where nobody has weighed.
NOTHING = PairMemory()


def pair_memory(pair: GraphPair, *, fused: bool) -> PairMemory:
    """What a pair makes and holds; ``fused``: when a compiler makes fewer and larger kernels of it."""
    graphs = pair.forward.graph, pair.backward.graph
    inputs, others = (graph.find_nodes(op="placeholder") for graph in graphs)
    first, second = lifetimes(graphs[0], inputs, fused=fused), lifetimes(graphs[1], others, fused=fused)
    forward, backward = len(first.calls), len(second.calls)
    modules, gradients = _modules(pair), _gradients(pair, inputs)
    given = _keys([node for node in inputs if node.name not in pair.upstream_inputs])
    there = {span.key: span for span in second.spans}
    # By the storage in forward: the slots, and the calls of backward from the first read on. Backward is given all.
    slots: dict[int, tuple[str, ...]] = {}
    reads: dict[int, tuple[int, int]] = {}
    for value in pair.saved_values():
        for key, other in zip(storages(value.source), storages(value.placeholder), strict=True):
            slots[key] = (*slots.get(key, ()), value.name)
            span = there.pop(other, None)
            if span is not None:
                reads[key] = forward + max(span.first, 0), forward + max(span.end, 0)
    found = []
    for span in first.spans:
        if span.key not in given and span.nbytes:
            buffer = _buffer(span, modules, 0)
            if span.key in reads:
                wanted, end = reads[span.key]
                left = max(span.last, buffer.start)
                buffer = replace(buffer, end=end, slots=slots[span.key], left=left, wanted=wanted)
            found.append(buffer)
    for span in second.spans:
        # What was saved is counted where forward makes it.
        if span.key in there and span.nbytes:
            found.append(replace(_buffer(span, modules, forward), is_gradient=span.key in gradients))
    return PairMemory(forward, backward, tuple(found), pair.repeats.are_tied)


def _buffer(span: Span, modules: Mapping[fx.Node, str], offset: int) -> Buffer:
    """A storage of the graph whose calls are counted from ``offset`` on."""
    start = max(span.start, 0) + offset
    is_given = span.node.op == "placeholder"
    op = ("tangent" if offset else "input") if is_given else str(span.node.target).removesuffix(".default")
    return Buffer(start, max(start, offset + span.end), span.nbytes, op, modules[span.node])


def _gradients(pair: GraphPair, inputs: Sequence[fx.Node]) -> set[int]:
    """The storages of what backward returns, but for the gradients of what earlier graphs made."""
    upstream = {i for i, node in enumerate(inputs) if node.name in pair.upstream_inputs}
    sources = pair.gradients_of_inputs()
    return _keys([node for i, node in enumerate(pair.backward_outputs) if sources.get(i) not in upstream])


def _keys(nodes: Sequence[object]) -> set[int]:
    return {key for node in nodes if isinstance(node, fx.Node) for key in storages(node)}


def _modules(pair: GraphPair) -> dict[fx.Node, str]:
    """By node, the module that it was traced in; what a pass has added belongs to the module of what it reads."""
    found: dict[fx.Node, str] = {}
    saved = {value.placeholder: value.source for value in pair.saved_values()}
    for node in (*pair.forward.graph.nodes, *pair.backward.graph.nodes):
        path = found.get(saved[node], "") if node in saved else module_path(node)
        is_traced = node.op != "call_function" or "stack_trace" in node.meta
        inherited = (found[i] for i in node.all_input_nodes if found[i] and not is_traced)
        found[node] = path or next(inherited, "")
    return found
