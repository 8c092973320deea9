"""Find the values that join results of layers far apart, as a residual stream does, and that are better saved.

Computed again, such a value wants the result of every layer that was added to the stream decoded at the same time, and
holds the errors of all their codes. On ResNet-50 that was most of the step's peak. What joins results of one depth, as
a gate and what it multiplies, is not meant: backward reads these together anyway. Nor is what only lies side by side,
as features that are concatenated: saving would take as much as what they were.
"""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gact_fx.graphs.edit import numel
from gact_fx.graphs.operator_table import MOVES
from gact_fx.graphs.operators import packet_of
from gact_fx.passes.is_cheap import is_cheap

# A source counts if it has this share of the elements of what it is read for, at least.
_LARGE = 1 / 4


def find_joins(forward: Iterable[fx.Node]) -> list[fx.Node]:
    """The cheap nodes of ``forward``, the part of a joint graph before the tangents, that are to be saved.

    Their sources have twice as many elements as they have, at least, and as many as the largest of all joins: smaller
    ones do not make the peak. Of a chain of joins every later one counts from the one before it. Nothing is meant that
    is marked already. Where all else is computed from one function of a join, as from the ReLU of a sum, that stands in
    its place.
    """
    nodes = [node for node in forward if node.op == "call_function"]
    largest = max(map(numel, _search(nodes, 0)), default=0)
    return _search(nodes, largest)


def _search(nodes: Sequence[fx.Node], least: int) -> list[fx.Node]:
    """The joins whose sources have ``least`` elements together, or more."""
    inside = set(nodes)
    depth: dict[fx.Node, int] = {}
    sources: dict[fx.Node, frozenset[fx.Node]] = {}
    found: dict[fx.Node, None] = {}
    for node in nodes:
        depth[node] = max((depth.get(i, 0) for i in node.all_input_nodes), default=0)
        if node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE:
            sources[node] = frozenset()
            continue
        depth[node] += not is_cheap(node)
        if is_cheap(node) and node not in found:
            every = {s for i in node.all_input_nodes for s in sources.get(i, ())}
            sources[node] = frozenset(s for s in every if numel(s) >= _LARGE * numel(node))
            are_far = len({depth[s] for s in sources[node]}) > 1
            is_much = sum(map(numel, sources[node])) >= max(2 * numel(node), least)
            if are_far and is_much and "recompute" not in node.meta:
                found[_last_alone(node, inside)] = None
        if not is_cheap(node) or node in found:
            sources[node] = frozenset({node})
    return sorted(found)


def _last_alone(node: fx.Node, inside: Collection[fx.Node]) -> fx.Node:
    """The last of the cheap functions of ``node`` that all its readers in forward read in its stead."""
    users = [user for user in node.users if user in inside]
    if len(users) != 1 or not is_cheap(users[0]) or "recompute" in users[0].meta or packet_of(users[0]) in MOVES:
        return node
    before, after = node.meta.get("val"), users[0].meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return node
    is_as_large = numel(users[0]) == numel(node) and after.itemsize <= before.itemsize
    return _last_alone(users[0], inside) if is_as_large else node
