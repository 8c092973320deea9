"""Add up in turn, around backward's peak, what would be added up at once.

A residual stream that is computed again is a sum over layers, and so is its gradient. In one kernel the compiler would
read all that is added, decoded, at the same time. A sum that something waits for, ``behind`` it, is made before the
next tensor is decoded.
"""

from collections.abc import Iterable, Mapping
from operator import getitem

import torch
from torch import fx

from gact_fx.graphs.edit import ancestors
from gact_fx.graphs.live_memory import Span, storages
from gact_fx.passes.backward_peak import Look, anchor_of, decompress, drop_unread, is_given, make_before, tensor_in


def add_values(look: Look) -> bool:
    """Of several values that are read together at the peak, have one decoded when the others are added up.

    Edits the graph in place; returns whether there was such a sum.
    """
    live = {n for n in (s.node for s in look.live) if look.is_repeatable(n) and _is_before_result(look, n)}
    if len(live) < 2:
        return False
    parts = _parts(look, live)
    for node in look.graph.nodes:
        sides = sorted((i for i in node.all_input_nodes if parts[i]), key=lambda i: len(parts[i]))
        if not parts[node] or node not in look.life.at or len(sides) != 2:
            continue
        one, others = sides
        is_sum = len(parts[one]) == 1 and not parts[one] <= parts[others]
        if is_sum and _decode_behind(look, node, one, others, parts):
            return True
    return False


def _is_before_result(look: Look, node: fx.Node) -> bool:
    """Whether ``node`` is there before the peak, or is decoded at the peak: other calls there make the result."""
    return node.target is decompress or look.life.at.get(node) != look.peak


def _parts(look: Look, live: set[fx.Node]) -> Mapping[fx.Node, frozenset[fx.Node]]:
    """By node, those of ``live`` that it is computed from, where it is computed from saved values alone."""
    parts: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in look.graph.nodes:
        if node in live:
            parts[node] = frozenset({node})
        elif look.is_repeatable(node) and not is_given(node):
            parts[node] = frozenset[fx.Node]().union(*(parts[i] for i in node.all_input_nodes))
        else:
            parts[node] = frozenset()
    return parts


def _decode_behind(
    look: Look, total: fx.Node, one: fx.Node, others: fx.Node, parts: Mapping[fx.Node, frozenset[fx.Node]]
) -> bool:
    """Decode ``one`` of the two that ``total`` is computed from behind the ``others``, unless that was done."""
    (decoding,) = parts[one]
    if decoding.target is not decompress:
        return False
    anchor = anchor_of(decoding)
    was_done = anchor is not None and anchor not in look.depends
    before = ancestors([others], is_given)
    path = sorted(node for node in ancestors([one], is_given) if decoding in parts[node])
    if was_done or any(node in before for node in path):
        return False
    total.replace_input_with(one, look.repeat(path, total, others, {})[one])
    drop_unread(path)
    return True


def add_gradients(look: Look) -> bool:
    """Have gradients that wait at the peak to be added up added before, when that leaves fewer bytes.

    Edits the graph in place; returns whether there were any.
    """
    if not look.live:
        return False
    spans = {tensor: span for span in look.life.spans if (tensor := tensor_in(span)) is not None}
    made = _sources(look, {span.node for span in look.life.spans})
    waiting = {tensor: s for s in look.live if s.start < look.peak and (tensor := tensor_in(s)) is not None}
    last = _last_reads(look)
    found: list[tuple[int, fx.Node, int]] = []
    for node in look.graph.nodes:
        given = [source for source in made[node] if source.op == "call_function"]
        is_kept = node.op != "call_function" or given == [node] or node not in look.depends
        if is_kept or len(given) < 2 or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        start = max(spans[n].start if n in spans else look.life.at.get(n, look.peak) for n in given)
        gain = _freed(look, node, given, waiting, made, last) - sum(storages(node).values())
        if start < look.peak and gain >= look.live[-1].nbytes:
            found.append((gain, node, start))
    found.sort(key=lambda each: -each[0])
    return any(make_before(look, node, start) for _, node, start in found)


def _sources(look: Look, makers: set[fx.Node]) -> Mapping[fx.Node, frozenset[fx.Node]]:
    """By node, what is in memory that it is computed from: itself, where its own result is."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in look.graph.nodes:
        is_there = node.op != "call_function" or node in makers or node.target is getitem or node not in look.life.at
        own = frozenset({node})
        found[node] = own if is_there else frozenset[fx.Node]().union(*(found[i] for i in node.all_input_nodes))
    return found


def _last_reads(look: Look) -> Mapping[fx.Node, int]:
    """By node, the last call that reads it, or what is computed from it where that is in no memory."""
    found: dict[fx.Node, int] = {}
    for node in reversed(look.graph.nodes):
        found[node] = _last_read(look, node.users, found)
    return found


def _last_read(look: Look, users: Iterable[fx.Node], last: Mapping[fx.Node, int]) -> int:
    """The last call by which ``users`` are computed, -1 where there are none; ``last`` is by node, too."""
    reads = (last[user] if user in look.life.inlined else look.life.at.get(user, look.peak) for user in users)
    return max(reads, default=-1)


def _freed(
    look: Look,
    total: fx.Node,
    given: list[fx.Node],
    waiting: Mapping[fx.Node, Span],
    made: Mapping[fx.Node, frozenset[fx.Node]],
    last: Mapping[fx.Node, int],
) -> int:
    """The bytes of those ``given`` for ``total`` that wait at the peak for ``total`` alone."""
    inside = ancestors([total], lambda node: node in given or node.op == "placeholder")
    needed: set[fx.Node] = set()
    for node in inside - {total}:
        if _last_read(look, (user for user in node.users if user not in inside), last) >= look.peak:
            needed |= made[node]
    return sum(waiting[node].nbytes for node in given if node in waiting and node not in needed)
