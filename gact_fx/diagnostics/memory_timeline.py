"""What is live in the course of a training step, before compression and after it, read off the rewritten graphs.

Sizes are those of the values that tracing left, a buffer lives from the operator that makes it to the last one that
reads it or a view of it, and every operator makes its result, as when a graph runs operator by operator: compiled code
fuses operators, and holds less in between. Parameters, gradients and what the caller gave are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from gact_fx.graphs.edit import ancestors
from gact_fx.graphs.module_names import module_path
from gact_fx.graphs.sizes import hint
from gact_fx.graphs.tensors import storage_key
from gact_fx.graphs.trees import tree_leaves
from gact_fx.passes.graph_analysis import is_counted
from gact_fx.training.rewrite import RewrittenGraph

_DECOMPRESS = torch.ops.gact_fx.decompress.default


@dataclass(frozen=True)
class Buffer:
    """Memory that is live from operator ``start`` to operator ``end``, both included; ``module`` made it."""

    start: int
    end: int
    nbytes: int
    module: str


@dataclass(frozen=True)
class Timeline:
    """The buffers of one step of ``length`` operators, of which the first ``forward`` are forward's."""

    length: int = 0
    forward: int = 0
    before: tuple[Buffer, ...] = ()
    after: tuple[Buffer, ...] = ()


def step_timeline(
    graphs: Sequence[RewrittenGraph], names: Sequence[Mapping[str, str]], runs: Sequence[int]
) -> Timeline:
    """The step in which every graph runs forward as often as ``runs`` says, and then all run backward in reverse."""
    order = [index for index, count in enumerate(runs) for _ in range(count)]
    found = {index: _Graph(graphs[index], names[index]) for index in set(order)}
    walks = {index: (graph.walk(with_codes=False), graph.walk(with_codes=True)) for index, graph in found.items()}
    starts, now = [], 0
    for index in order:
        starts.append(now)
        now += walks[index][0].forward
    forward = now
    turns = []
    for index in reversed(order):
        turns.append(now)
        now += walks[index][0].backward
    places = list(zip(order, starts, reversed(turns), strict=True))
    before, after = (
        tuple(buffer for index, start, turn in places for buffer in walks[index][which].placed(start, turn))
        for which in (0, 1)
    )
    return Timeline(now, forward, before, after)


@dataclass(frozen=True)
class _Walk:
    """The buffers of one graph, by its own count: forward's operators from 0 on, backward's behind them."""

    forward: int
    backward: int
    buffers: tuple[Buffer, ...]

    def placed(self, start: int, turn: int) -> Iterator[Buffer]:
        """The buffers in a step where forward begins at ``start`` and backward at ``turn``."""

        def place(when: int) -> int:
            return start + when if when < self.forward else turn + when - self.forward

        return (Buffer(place(b.start), place(b.end), b.nbytes, b.module) for b in self.buffers)


class _Graph:
    """One pair of graphs, and what both ways through it have in common."""

    def __init__(self, graph: RewrittenGraph, names: Mapping[str, str]) -> None:
        self.pair = graph.replayable
        self.saved = {tensor.name: tensor for tensor in graph.analysis.saved}
        self.forward, self.backward = _calls(self.pair.forward), _calls(self.pair.backward)
        self.slots = {value.name: value.placeholder for value in self.pair.saved_values()}
        self.modules: dict[fx.Node, str] = {}
        for node in (*self.pair.forward.graph.nodes, *self.pair.backward.graph.nodes):
            path = self.saved[node.name].module if node in self.slots.values() else module_path(node)
            # What a pass has added belongs to the module of what it reads.
            is_traced = node.op != "call_function" or "stack_trace" in node.meta
            inherited = (self.modules[i] for i in node.all_input_nodes if self.modules[i] and not is_traced)
            self.modules[node] = names.get(path, path) or next(inherited, "")

    def walk(self, *, with_codes: bool) -> _Walk:
        """What is live in a step, as the graphs are or, without codes, with what the codes stand for in their place."""
        count = len(self.forward)
        decoded = {slot: [] if with_codes else _decoded(placeholder) for slot, placeholder in self.slots.items()}
        deaths = _deaths(self.backward, count)
        # Backward is given all that was saved, also what it does not read.
        lasts = {
            slot: max(count, 0, *(deaths.get(key, 0) for node in (placeholder, *decoded[slot]) for key in _sizes(node)))
            for slot, placeholder in self.slots.items()
        }
        buffers = self._in_forward(lasts, with_codes=with_codes)
        tangents = [
            node for node in self.pair.backward.graph.find_nodes(op="placeholder") if node.name not in self.slots
        ]
        # Gradients stay; what was saved is counted where forward makes it.
        left_out = [*self.slots.values(), *(node for several in decoded.values() for node in several)]
        left_out += [node for node in self.pair.backward_outputs if isinstance(node, fx.Node)]
        buffers += self._buffers(self.backward, count, tangents, {}, left_out)
        return _Walk(count, len(self.backward), tuple(buffers))

    def _in_forward(self, lasts: Mapping[str, int], *, with_codes: bool) -> list[Buffer]:
        pair, count = self.pair, len(self.forward)
        end = count + len(self.backward) - 1
        inputs = pair.forward.graph.find_nodes(op="placeholder")
        # What the caller gave, and got: it holds that for as long as the step takes.
        given = [node for node in inputs if node.name not in pair.upstream_inputs]
        upstream = [node for node in inputs if node.name in pair.upstream_inputs]
        ends = {node: end for node in pair.forward_outputs[: pair.num_user_outputs] if isinstance(node, fx.Node)}
        buffers: list[Buffer] = []
        by_name = {node.name: node for node in pair.forward.graph.nodes}
        known = set[int]()
        for value in pair.saved_values():
            tensor = self.saved[value.name]
            source = value.source if with_codes else by_name.get(value.name)
            if source is not None:
                ends[source] = max(ends.get(source, 0), lasts[value.name])
            elif is_counted(tensor) and tensor.storage not in known:
                # Only codes of what follows from it are made any more.
                buffers.append(
                    Buffer(count - 1, lasts[value.name], tensor.storage_nbytes, self.modules[value.placeholder])
                )
                known.add(tensor.storage)
        needed = self.forward if with_codes else ancestors(ends)
        nodes = [node if node in needed else None for node in self.forward]
        return buffers + self._buffers(nodes, 0, upstream, ends, given)

    def _buffers(
        self,
        nodes: Sequence[fx.Node | None],
        offset: int,
        there: Sequence[fx.Node],
        ends: Mapping[fx.Node, int],
        left_out: Sequence[fx.Node],
    ) -> list[Buffer]:
        """The buffers that ``nodes`` make from ``offset`` on, beside those that are ``there``, live until ``ends``."""
        made: dict[int, tuple[int, int, str]] = {}
        for when, node in [*((offset, node) for node in there), *enumerate(nodes, offset)]:
            if node is not None:
                for key, nbytes in _sizes(node).items():
                    made.setdefault(key, (when, nbytes, self.modules[node]))
        deaths = _deaths(nodes, offset)
        for node, end in ends.items():
            for key in _sizes(node):
                deaths[key] = max(deaths.get(key, 0), end)
        known = {key for node in left_out for key in _sizes(node)}
        return [
            Buffer(start, max(deaths.get(key, start), start), nbytes, module)
            for key, (start, nbytes, module) in made.items()
            if key not in known and nbytes
        ]


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def _decoded(slot: fx.Node) -> list[fx.Node]:
    """What is decompressed of a slot's blob."""
    return [user for user in slot.users if user.target is _DECOMPRESS]


def _deaths(nodes: Sequence[fx.Node | None], offset: int) -> dict[int, int]:
    """When each storage is read for the last time, if nodes are counted from ``offset`` on."""
    deaths: dict[int, int] = {}
    for when, node in enumerate(nodes, offset):
        for source in node.all_input_nodes if node is not None else ():
            deaths.update(dict.fromkeys(_sizes(source), when))
    return deaths


def _sizes(node: fx.Node) -> dict[int, int]:
    """The storages of what ``node`` gives, with their bytes."""
    values = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]
    return {storage_key(value): hint(value.untyped_storage().nbytes()) for value in values}
