"""Cut a backward graph into segments whose derivatives are computed one at a time.

Between segments only what crosses a cut is kept, in 8 bits; within one, everything is computed again. Few cuts make
for long segments, many for much that crosses: the best cuts under a limit on the work of a segment are found by
dynamic programming, and the limit such that both together take the least memory. With what a segment works on counts
what waits for it: the derivatives, of every probe, with respect to all that crosses its end, in codes as well.

Segments are in groups. All that crosses from one group to a later one is kept from the beginning; what crosses segments
of one group alone, only while derivatives are computed in that group.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise
from operator import getitem
from typing import Any

import torch
from torch import fx

from gact_fx.codec.packed_tensors import packed_nbytes
from gact_fx.graphs.edit import elements_nbytes, tensors_of
from gact_fx.graphs.operators import packet_of, returns_alias
from gact_fx.graphs.sizes import hint

Segment = list[fx.Node]
# How much of a segment's work is in memory at once while it is differentiated (least for BERT: 522 MB of 546 at 0.4).
_ALIVE = 0.8


def cut_backward(
    nodes: Sequence[fx.Node], loads: Collection[fx.Node], carriers: Collection[fx.Node] = (), probes: int = 0
) -> list[Segment]:
    """``nodes`` in segments: all that is computed, in an order in which it can be; ``loads`` are read anew in each.

    ``carriers`` are the nodes with derivatives, one of each for every one of ``probes``.
    """
    nodes = _with_parts(nodes)
    work, kept, last = _costs(nodes, loads)
    waiting = _waiting(nodes, last, carriers, probes)
    best, found = math.inf, [nodes]
    # From short segments up, which take little search; long ones only serve graphs that are short themselves.
    limit, worse = _ALIVE * max(work, default=0.0), 0
    while worse < 3 and limit < best:
        stored, ends = _best_ends(work, kept, last, waiting, limit)
        segments = list(pairwise((0, *ends)))
        # A segment of one node may take more than the limit.
        most = max((_ALIVE * sum(work[start:end]) + waiting[end] for start, end in segments), default=0.0)
        worse += 1
        if stored + most < best:
            best, worse = stored + most, 0
            found = [nodes[start:end] for start, end in segments]
        limit *= 1.5
    return found


def group_segments(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Neighbours in groups, between which about as much crosses: about as many groups as segments in each.

    With what crosses from group to group, that between the segments of one group can be computed when its turn comes.
    """
    place = {node: at for at, segment in enumerate(segments) for node in segment}
    sizes = [
        sum(_packed_nbytes(node) for node in segment if any(place.get(user, at) > at for user in node.users))
        for at, segment in enumerate(segments)
    ]
    share = sum(sizes) / math.sqrt(max(len(segments), 1))
    groups: list[list[Segment]] = []
    filled = math.inf
    for segment, size in zip(segments, sizes, strict=True):
        if filled + size > share:
            groups.append([])
            filled = 0.0
        groups[-1].append(segment)
        filled += size
    return groups


def inputs_of(segment: Segment) -> list[fx.Node]:
    """The nodes outside of a segment that it reads."""
    inside = set(segment)
    return list(dict.fromkeys(i for node in segment for i in node.all_input_nodes if i not in inside))


def summands(node: fx.Node, sums: set[fx.Node]) -> list[fx.Node]:
    """What a result is the sum of, itself if it is none; ``sums`` gets those that nothing else reads."""
    parts = node.all_input_nodes
    is_sum = packet_of(node) is torch.ops.aten.add and tuple(parts) == node.args and not node.kwargs
    if not is_sum or len(node.users) > 1 or any(_kind(part) != _kind(node) for part in parts):
        return [node]
    sums.add(node)
    return [summand for part in parts for summand in summands(part, sums)]


def _kind(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return (tuple(map(hint, value.shape)), value.dtype) if isinstance(value, torch.Tensor) else None


def find_loads(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What is cheaper to read anew than to keep: arguments, what blobs stand for, and sizes."""
    found: set[fx.Node] = set()
    for node in nodes:
        # Arithmetic on sizes that was added after tracing has no value noted.
        is_size = isinstance(node.meta.get("val"), (int, torch.SymInt, type(None))) and node.op == "call_function"
        is_read = node.target is torch.ops.gact_fx.decompress.default or is_size
        if node.op in ("placeholder", "get_attr") or (is_read and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _with_parts(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The same nodes, with the parts of what returns several tensors right behind it."""
    ordered: dict[fx.Node, None] = {}

    def add(node: fx.Node) -> None:
        ordered[node] = None
        for user in node.users:
            if user.target is getitem:
                add(user)

    for node in nodes:
        if node not in ordered:
            add(node)
    return list(ordered)


def _costs(nodes: Sequence[fx.Node], loads: Collection[fx.Node]) -> tuple[list[float], list[float], list[int]]:
    """Per node: bytes that computing it takes, bytes to keep it across a cut, and where it is used last."""
    position = {node: at for at, node in enumerate(nodes)}
    work: list[float] = []
    kept: list[float] = []
    last = []
    loaded: set[fx.Node] = set()
    for node in nodes:
        new = {i for i in node.all_input_nodes if i in loads} - loaded
        loaded |= new
        is_view = node.target is getitem or returns_alias(node.target)
        work.append((0.0 if is_view else elements_nbytes(node)) + sum(map(elements_nbytes, new)))
        kept.append(_packed_nbytes(node))
        if isinstance(node.meta.get("val"), (tuple, list)):
            # Its parts cross instead.
            kept[-1] = math.inf
        last.append(max((position[user] for user in node.users if user in position), default=-1))
    return work, kept, last


def _waiting(nodes: Sequence[fx.Node], last: Sequence[int], carriers: Collection[fx.Node], probes: int) -> list[float]:
    """Bytes of the derivatives with respect to what crosses each cut, by the cut's position."""
    changes = [0.0] * (len(nodes) + 2)
    for at, node in enumerate(nodes):
        if node in carriers and last[at] > at:
            changes[at + 1] += probes * _packed_nbytes(node)
            changes[last[at] + 1] -= probes * _packed_nbytes(node)
    return list(accumulate(changes))


def _best_ends(
    work: Sequence[float], kept: Sequence[float], last: Sequence[int], waiting: Sequence[float], limit: float
) -> tuple[float, list[int]]:
    """The least that must be kept with segments that take at most ``limit`` (or have one node), and where those end."""
    total, before = [0.0], [0]
    for end in range(1, len(work) + 1):
        least, start = math.inf, end - 1
        size, crossing = waiting[end], 0.0
        for at in range(end - 1, -1, -1):
            size += _ALIVE * work[at]
            if size > limit and least < math.inf:
                break
            crossing += kept[at] if last[at] >= end else 0.0
            if crossing == math.inf:
                break
            if total[at] + crossing < least:
                least, start = total[at] + crossing, at
        total.append(least)
        before.append(start)
    ends = []
    end = len(work)
    while end:
        ends.append(end)
        end = before[end]
    return total[-1], ends[::-1]


def _packed_nbytes(node: fx.Node) -> float:
    return float(sum(packed_nbytes(x.dtype, hint(x.numel())) for x in tensors_of(node)))
