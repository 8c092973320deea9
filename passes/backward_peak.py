"""What is live at the peak of backward, and what could be computed again: a look that `lower_peak` takes each round."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import getitem

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import add_call, ancestors, infer, tensors_of
from gact_fx.graphs.fused_loops import is_of_library
from gact_fx.graphs.live_memory import Lifetimes, Span, lifetimes, storages
from gact_fx.graphs.operators import OpOverload, writes
from gact_fx.passes.find_masks import draws

decompress = torch.ops.gact_fx.decompress.default
behind = torch.ops.gact_fx.behind.default
made = torch.ops.gact_fx.made.default
# What has a smaller share of all that is live at the peak is left alone, and what has fewer bytes.
_SHARE, WORTH_NBYTES = 1 / 100, 2**18


@dataclass(frozen=True, eq=False)
class Look:
    """Backward's ``graph`` with its ``life`` in memory, of which ``level`` bytes, the most, are live at call ``peak``.

    ``depends`` are the nodes that are computed from tangents.
    """

    graph: fx.Graph
    life: Lifetimes
    depends: Collection[fx.Node]
    peak: int
    level: int

    @classmethod
    def at(cls, pair: GraphPair, *, fused: bool) -> "Look":
        """Backward of ``pair`` as it is now; of its inputs those are freed that forward, or the caller, made for it."""
        graph, tangents = pair.backward.graph, pair.tangents()
        made = {v.placeholder for v in pair.saved_values() if v.source.op != "placeholder"}
        inputs = graph.find_nodes(op="placeholder")
        life = lifetimes(graph, [n for n in inputs if n in made or n.name in tangents], fused=fused)
        levels = life.levels()[1:]
        peak = max(range(len(levels)), key=levels.__getitem__, default=0)
        return cls(graph, life, dependents_of_tangents(graph, tangents), peak, max(levels, default=0))

    @cached_property
    def live(self) -> tuple[Span, ...]:
        """What is live at the peak and counts, the largest first."""
        least = max(self.level * _SHARE, WORTH_NBYTES)
        found = [s for s in self.life.spans if s.start <= self.peak <= s.end and s.nbytes >= least]
        return tuple(sorted(found, key=lambda s: -s.nbytes))

    def is_repeatable(self, node: fx.Node) -> bool:
        """Whether ``node`` can be computed again: it is cheap, and made of what forward has saved."""
        return node not in self.depends and is_cheap_call(node)

    def repeat(
        self, nodes: Iterable[fx.Node], place: fx.Node, anchor: fx.Node, twins: dict[fx.Node, fx.Node]
    ) -> dict[fx.Node, fx.Node]:
        """Compute ``nodes``, in their order, again right before ``place``, from codes that are read behind ``anchor``.

        ``twins`` has what was computed again already, and gets what is new.
        """
        with self.graph.inserting_before(place):
            for node in nodes:
                if node in twins:
                    continue
                twins[node] = self.graph.node_copy(node, lambda n: twins.get(n, n))
                if node.target is decompress:
                    read_behind(twins[node], anchor)
                if any(map(has_tensor, node.all_input_nodes)):
                    infer(twins[node])
        return twins


def is_cheap_call(node: fx.Node) -> bool:
    """Whether ``node`` decodes, or is a call without a library's work, random numbers or writes."""
    is_plain = isinstance(node.target, OpOverload) or node.target is getitem
    if node.op != "call_function" or not is_plain:
        return False
    return node.target is decompress or not (is_of_library(node) or draws(node) or writes(node.target))


def drop_unread(nodes: Iterable[fx.Node]) -> None:
    """Erase those of ``nodes`` that nobody reads any more, and blobs that were read behind something for them alone."""
    for node in sorted(nodes, reverse=True):
        if not node.users and node.op == "call_function":
            ties = [source for source in node.all_input_nodes if source.target is behind and len(source.users) == 1]
            node.graph.erase_node(node)
            for tie in ties:
                tie.graph.erase_node(tie)


def read_behind(decoding: fx.Node, anchor: fx.Node) -> None:
    """Have ``decoding``, which decompresses, do so once ``anchor`` is there, and not before.

    What `make_before` has in memory for it stays there; what else it was decoded behind is forgotten.
    """
    before = _before(decoding)
    if before is not None and before.target is made:
        with decoding.graph.inserting_before(decoding):
            anchor = add_call(decoding.graph, made, (anchor, before), f"{anchor.name}_made")
    _tie(decoding, anchor)


def anchor_of(decoding: fx.Node) -> fx.Node | None:
    """What ``decoding`` was last said to be behind, None where it reads its blob at once."""
    before = _before(decoding)
    anchor = before.args[0] if before is not None and before.target is made else before
    return anchor if isinstance(anchor, fx.Node) else None


def _before(decoding: fx.Node) -> fx.Node | None:
    blob = decoding.args[0]
    before = blob.args[1] if isinstance(blob, fx.Node) and blob.target is behind else None
    return before if isinstance(before, fx.Node) else None


def _tie(decoding: fx.Node, before: fx.Node) -> None:
    blob = decoding.args[0]
    assert isinstance(blob, fx.Node)
    with decoding.graph.inserting_before(decoding):
        tied = add_call(decoding.graph, behind, (blob_of(decoding), before), f"{before.name}_behind")
    decoding.replace_input_with(blob, tied)
    if blob.target is behind and not blob.users:
        decoding.graph.erase_node(blob)


def make_before(look: Look, node: fx.Node, start: int) -> bool:
    """Have ``node``, whose sources are there after call ``start``, in memory before the next value is decoded.

    Values count that are live at the peak; returns whether there is one. Who reads ``node`` reads what is in memory.
    """
    decodings = [span.node for span in look.live if span.node.target is decompress and start < span.start]
    if not decodings:
        return False
    place = min(decodings)
    for each in sorted(n for n in ancestors([node], lambda n: n < place) if n > place):
        place.prepend(each)
    with look.graph.inserting_after(node):
        token = add_call(look.graph, made, (node,), f"{node.name}_made")
    if (before := _before(place)) is not None:
        # What the value is decoded behind already is to be there, too.
        with look.graph.inserting_before(place):
            token = add_call(look.graph, made, (before, token), f"{before.name}_too")
    _tie(place, token)
    return True


def blob_of(decoding: fx.Node) -> fx.Node:
    """The blob that ``decoding`` reads, behind whatever it does so."""
    blob = decoding.args[0]
    while isinstance(blob, fx.Node) and blob.target is behind:
        blob = blob.args[0]
    assert isinstance(blob, fx.Node)
    return blob


def has_tensor(node: fx.Node) -> bool:
    """Whether ``node`` gives a tensor, or several, and not a size."""
    return bool(tensors_of(node))


def is_given(node: fx.Node) -> bool:
    """Whether ``node`` is there without being computed: an input, or a blob that is read behind something else."""
    return node.op == "placeholder" or node.target is behind


def tensor_in(span: Span) -> fx.Node | None:
    """The tensor that has the storage of ``span``: what makes it may give several."""
    nodes = [span.node, *span.node.users]
    return next((n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor) and span.key in storages(n)), None)


def dependents_of_tangents(graph: fx.Graph, tangents: Collection[str]) -> set[fx.Node]:
    """What is computed from ``tangents``. What is only read behind something is not computed from that."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.args[:1] if node.target is behind else node.all_input_nodes
        if node.name in tangents or any(source in found for source in sources):
            found.add(node)
    return found
