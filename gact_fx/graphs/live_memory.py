"""How much memory a graph needs while it runs, read off the sizes that tracing left.

Operator by operator, a storage lives from the operator that makes it to the last one that reads it or a view of it,
which writes there if it is pointwise. A compiler that fuses operators makes less: what only operators of the same
kernel read is never in memory.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx

from gact_fx.graphs.edit import numel, tensors_of
from gact_fx.graphs.fused_loops import find_inlined, find_ranks, is_foreign, is_of_library
from gact_fx.graphs.in_place import find_last_reads, fits
from gact_fx.graphs.operators import packet_of, returns_alias
from gact_fx.graphs.sizes import hint
from gact_fx.graphs.tensors import storage_key
from gact_fx.graphs.workspace import workspace_nbytes

aten = torch.ops.aten
# Their result is their first argument but for a few elements.
WRITERS = frozenset({
    aten.index_put, aten._unsafe_index_put, aten._unsafe_masked_index_put_accumulate, aten.scatter, aten.scatter_add,
    aten.scatter_reduce, aten.index_add,
})  # fmt: skip
_COMPRESS = "gact_fx.compress.default"


def storages(node: fx.Node) -> dict[int, int]:
    """The storages of what ``node`` gives, with their bytes."""
    return {storage_key(value): hint(value.untyped_storage().nbytes()) for value in tensors_of(node)}


@dataclass(frozen=True)
class Span:
    """A storage, which ``node`` makes, is live from call ``start`` of its graph to call ``end``, both included.

    What the graph is given is there from -1 on; what nobody reads of that is gone at -1, too. ``first`` and ``last``
    are the calls that read it, the one that makes it counted with them.
    """

    key: int
    node: fx.Node
    start: int
    end: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Lifetimes:
    """The ``calls`` of a graph in the order in which they run, and the ``spans`` of storages that are live meanwhile.

    ``at`` says when a call runs. One that is ``inlined``, whose result is never in memory, runs when the first of its
    readers does, and once more for every other one.
    """

    calls: Sequence[fx.Node]
    spans: Sequence[Span]
    at: Mapping[fx.Node, int]
    inlined: Collection[fx.Node]

    def levels(self) -> list[int]:
        """The bytes that are live when the graph begins, and then at each call."""
        changes = [0] * (len(self.calls) + 2)
        for span in self.spans:
            changes[span.start + 1] += span.nbytes
            changes[span.end + 2] -= span.nbytes
        return list(accumulate(changes))[:-1]


def lifetimes(graph: fx.Graph, freed: Collection[fx.Node], *, fused: bool) -> Lifetimes:
    """What ``graph`` has in memory while it runs.

    ``freed`` are the inputs that nobody else holds: these are freed after their last use.
    """
    return _Walk(graph, freed, fused).lifetimes()


def peak_nbytes(graph: fx.Graph, freed: Collection[fx.Node], *, fused: bool) -> int:
    """The most bytes that are live while ``graph`` runs, above those that are live when it begins."""
    levels = lifetimes(graph, freed, fused=fused).levels()
    return max(levels) - levels[0]


class _Walk:
    """One way through a graph, operator by operator."""

    def __init__(self, graph: fx.Graph, freed: Collection[fx.Node], fused: bool) -> None:
        self._nodes = [node for node in graph.nodes if node.op == "call_function"]
        self._sizes: dict[fx.Node, dict[int, int]] = {}
        for node in graph.nodes:
            source = node.args[0] if node.args and returns_alias(node.target) else None
            if node.op != "output":
                # A view of what is read from codes was traced as a view of what these stand for.
                self._sizes[node] = self._sizes[source] if isinstance(source, fx.Node) else storages(node)
        self._nbytes = {key: nbytes for sizes in self._sizes.values() for key, nbytes in sizes.items()}
        self._inputs = graph.find_nodes(op="placeholder")
        self._given = {key for node in self._inputs for key in self._sizes[node]}
        kept = {key for node in self._inputs if node not in freed for key in self._sizes[node]}
        self._stays = kept | {key for node in graph.output_node().all_input_nodes for key in self._sizes[node]}
        self._views = {node for node in self._nodes if self._is_view(node)}
        self._fused = fused
        self._last_reads = {} if fused else find_last_reads(graph)
        # What Inductor does not write over: what the graph is given, and what operators made.
        self._fixed = self._given | {key for node in self._nodes if is_foreign(node) for key in self._sizes[node]}
        self._inlined = find_inlined(self._nodes, self._views, find_ranks(graph)) if fused else set[fx.Node]()
        self._unmade = {key for node in self._inlined for key in self._sizes[node]}
        self._mixed = self._find_mixed() if fused else set[fx.Node]()
        self._nodes = self._in_order() if fused else self._nodes
        self._when = {node: when for when, node in enumerate(self._nodes)}

    def lifetimes(self) -> Lifetimes:
        """What is live, and when."""
        at = dict(self._when)
        for node in reversed(self._nodes):
            if node in self._inlined:
                at[node] = min((at[user] for user in node.users if user in at), default=at[node])
        spans = [*self._spans(), *self._workspaces()]
        return Lifetimes(self._nodes, spans, at, self._inlined)

    def _spans(self) -> list[Span]:
        made = {key: (node, -1, nbytes) for node in self._inputs for key, nbytes in self._sizes[node].items()}
        firsts, lasts = self._find_reads()
        ends = {key: when for key, when in lasts.items() if key not in self._stays and key not in self._unmade}
        known = self._given | self._unmade
        dying: dict[int, list[int]] = {}
        for key, when in ends.items():
            dying.setdefault(when, []).append(key)
        for when, node in enumerate(self._nodes):
            new = {key: nbytes for key, nbytes in self._sizes[node].items() if key not in known}
            known.update(new)
            made.update({key: (node, when, nbytes) for key, nbytes in new.items()})
            for key in self._written_over(node, new, dying.get(when, [])):
                ends[key] = when - 1
        final = len(self._nodes) - 1
        return [
            Span(key, node, start, ends.get(key, final), nbytes, firsts.get(key, start), lasts[key])
            for key, (node, start, nbytes) in made.items()
        ]

    def _workspaces(self) -> list[Span]:
        """What operators have in memory for the length of a call."""
        sizes = [(when, node, workspace_nbytes(node, fused=self._fused)) for when, node in enumerate(self._nodes)]
        return [Span(-1 - when, node, when, when, nbytes, when, when) for when, node, nbytes in sizes if nbytes]

    def _find_reads(self) -> tuple[dict[int, int], dict[int, int]]:
        """By storage, the call that reads it first, and the one that reads or makes it last."""
        read: dict[fx.Node, int] = {}
        for node in reversed(self._nodes):
            is_unmade = node in self._inlined or not self._sizes[node].keys().isdisjoint(self._unmade)
            # What is not made is computed where its readers are.
            later = [read[user] for user in node.users if user in read] if is_unmade else []
            read[node] = max(later, default=self._when[node])
        last = {key: self._when.get(node, -1) for node in self._sizes for key in self._sizes[node]}
        first: dict[int, int] = {}
        for node in self._nodes:
            for key in (key for source in node.all_input_nodes for key in self._sizes[source]):
                first.setdefault(key, self._when[node])
                last[key] = max(last[key], read[node])
        return first, last

    def _written_over(self, node: fx.Node, new: dict[int, int], dying: list[int]) -> list[int]:
        """The storages of those that die here that are written over, rather than freed."""
        if not self._fused:
            return self._written_in_place(node, dying)
        is_writer = packet_of(node) in WRITERS
        if (is_of_library(node) and not is_writer) or node in self._mixed:
            return []
        room, found = Counter(new.values()), []
        first = self._sizes[node.all_input_nodes[0]] if is_writer else {}
        for key in dying:
            is_own = key not in self._fixed and key not in new
            if is_own and (key in first or not is_writer) and room[self._nbytes[key]]:
                room[self._nbytes[key]] -= 1
                found.append(key)
        return found

    def _find_mixed(self) -> set[fx.Node]:
        """The calls that read several tensors as large as their result, with dimensions in different orders in memory.

        Inductor chooses an order for such a result, and writes over nothing. Codes whose dimensions were moved decode
        to another order than the traced one, since Inductor drops the copy that would restore the order.
        """
        mixed: set[fx.Node] = set()
        # By call, whether the order is another one than it was traced in.
        orders: dict[fx.Node, set[bool]] = {}
        sizes: dict[fx.Node, int] = {}
        for node in self._nodes:
            sizes[node] = numel(node)
            alike = [orders[i] for i in node.all_input_nodes if i in orders and sizes[i] == sizes[node]]
            orders[node] = set[bool]().union(*alike)
            is_made = node not in self._inlined and node not in self._views
            if packet_of(node) is aten.clone and not is_made:
                orders[node] = {True}
            elif is_made and len(orders[node]) > 1:
                mixed.add(node)
            if is_of_library(node) or not alike or node in mixed:
                orders[node] = {False}
        return mixed

    def _written_in_place(self, node: fx.Node, dying: list[int]) -> list[int]:
        """The storage that a pointwise operator writes over by itself, if there is one."""
        for source in self._last_reads.get(node, {}):
            if fits(node, source):
                return [key for key in self._sizes[source] if key in dying]
        return []

    def _in_order(self) -> list[fx.Node]:
        """The calls in the order in which compiled code runs them: codes, which free most, as soon as they can be."""
        behind: dict[fx.Node, list[fx.Node]] = {}
        place = {node: index for index, node in enumerate(self._nodes)}
        moved = set()
        for node in self._nodes:
            sources = [source for source in node.all_input_nodes if source in place]
            if sources and (node in self._views or str(node.target) == _COMPRESS):
                behind.setdefault(max(sources, key=place.__getitem__), []).append(node)
                moved.add(node)
        order: list[fx.Node] = []
        for root in (node for node in self._nodes if node not in moved):
            waiting = [root]
            while waiting:
                order.append(waiting.pop())
                waiting += reversed(behind.get(order[-1], []))
        return order

    def _is_view(self, node: fx.Node) -> bool:
        """Whether ``node`` gives memory that was there before."""
        before = {key for source in node.all_input_nodes for key in self._sizes[source]}
        return bool(self._sizes[node]) and self._sizes[node].keys() <= before


def nbytes(node: fx.Node) -> int:
    """Bytes of the memory that the results of ``node`` lie in, on the traced batch."""
    return sum(storages(node).values())
