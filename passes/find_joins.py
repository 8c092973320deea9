"""Find the values that join results of layers far apart, as a residual stream does, and that are better saved.

Computed again, such a value wants the result of every layer that was added to the stream decoded at the same time, and
holds the errors of all their codes. On ResNet-50 that was most of the step's peak. What joins results of one depth, as
a gate and what it multiplies, is not meant: backward reads these together anyway. Nor is what only lies side by side,
as features that are concatenated: saving would take as much as what they were.
"""

from collections.abc import Iterable, Sequence

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gact_fx.graphs.edit import numel
from gact_fx.passes.is_cheap import is_cheap

# A source counts if it has this share of the elements of what it is read for, at least.
_LARGE = 1 / 4


def find_joins(forward: Iterable[fx.Node]) -> list[fx.Node]:
    """The cheap nodes of ``forward``, the part of a joint graph before the tangents, that are to be saved.

    Their sources have twice as many elements as they have, at least, and as many as the largest of all joins: smaller
    ones do not make the peak. Of a chain of joins every later one counts from the one before it. Only what an operator
    reads that is not cheap is meant, and nothing that is marked already.
    """
    nodes = [node for node in forward if node.op == "call_function"]
    largest = max(map(numel, _search(nodes, 0)), default=0)
    return _search(nodes, largest)


def _search(nodes: Sequence[fx.Node], least: int) -> list[fx.Node]:
    """The joins whose sources have ``least`` elements together, or more."""
    inside = set(nodes)
    depth: dict[fx.Node, int] = {}
    sources: dict[fx.Node, frozenset[fx.Node]] = {}
    found = []
    for node in nodes:
        depth[node] = max((depth.get(i, 0) for i in node.all_input_nodes), default=0)
        if node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE:
            sources[node] = frozenset()
        elif not is_cheap(node):
            depth[node] += 1
            sources[node] = frozenset({node})
        else:
            every = {s for i in node.all_input_nodes for s in sources.get(i, ())}
            sources[node] = frozenset(s for s in every if numel(s) >= _LARGE * numel(node))
            are_far = len({depth[s] for s in sources[node]}) > 1
            is_much = sum(map(numel, sources[node])) >= max(2 * numel(node), least)
            is_read = any(user in inside and not is_cheap(user) for user in node.users)
            if are_far and is_much and is_read and "recompute" not in node.meta:
                found.append(node)
                sources[node] = frozenset({node})
    return found
