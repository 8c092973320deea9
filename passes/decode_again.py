"""Decode again, behind backward's peak, what would be held across the peak.

Backward reads a decoded tensor, or what is computed of several, at more than one place: for the weight of a later
layer, say, and at its own. The compiler makes such a value once and holds it in between.
"""

from collections.abc import Collection

from torch import fx

from gact_fx.graphs.edit import ancestors
from gact_fx.graphs.live_memory import Span, nbytes
from gact_fx.passes.backward_peak import WORTH_NBYTES, Look, drop_unread, has_tensor, is_cheap_call, is_given, tensor_in

# (a value, who reads it)
_Edge = tuple[fx.Node, fx.Node]


def decode_again(look: Look) -> bool:
    """Edit the graph in place; returns whether anything that was held across the peak no longer is."""
    return _split_each(look, ())


def decode_again_for_gradients(look: Look) -> bool:
    """The same, also for gradients that read such a value and are never in memory, but computed where they are read."""
    return _split_each(look, look.life.inlined)


def _split_each(look: Look, inlined: Collection[fx.Node]) -> bool:
    held = [span for span in look.live if span.end > look.peak and look.is_repeatable(span.node)]
    # Each, not only the first.
    return any([_split(look, span, inlined) for span in held])


def _split(look: Look, span: Span, inlined: Collection[fx.Node]) -> bool:
    """Have those who read ``span`` behind the peak read what is computed again for them."""
    if not _is_computed(span.node):
        return False
    derived, edges = _reads(look, span.node, inlined)
    final = len(look.life.calls)
    when = {reader: look.life.at.get(reader, final) for _, reader in edges}
    late = sorted((edge for edge in edges if when[edge[1]] > look.peak), key=lambda edge: edge[1])
    if not late or len(late) == len(edges):
        return False
    anchor = _anchor(look, late[0][1], min(when[reader] for _, reader in late))
    # What lies between the value and its readers, what the value is computed from, and what is gone by then.
    needed = derived | ancestors([span.node], is_given)
    wanted = [
        sorted(n for n in _gone(look, value, needed, when[reader]) if n in derived or _is_computed(n))
        for value, reader in late
    ]
    if anchor is None or not all(_may_be_repeated(look, n, inlined) for nodes in wanted for n in nodes):
        return False
    twins: dict[fx.Node, fx.Node] = {}
    for (value, reader), nodes in zip(late, wanted, strict=True):
        look.repeat(nodes, reader, anchor, twins)
        reader.replace_input_with(value, twins[value])
    drop_unread(twins)
    return True


def _reads(look: Look, node: fx.Node, inlined: Collection[fx.Node]) -> tuple[set[fx.Node], list[_Edge]]:
    """What is computed of ``node`` and of saved values alone, ``node`` included; and who of the others reads that.

    What is ``inlined`` reads ``node`` whenever one of its readers runs, and counts with the former.
    """
    derived: set[fx.Node] = {node}
    edges: list[_Edge] = []
    for each in look.graph.nodes:
        sources = [source for source in each.all_input_nodes if source in derived]
        is_free = each not in look.depends or each in inlined
        if sources and each.op == "call_function" and is_free and not is_given(each):
            derived.add(each)
        else:
            edges += [(source, each) for source in sources if not is_given(each)]
    return derived, edges


def _gone(look: Look, value: fx.Node, needed: Collection[fx.Node], when: int) -> set[fx.Node]:
    """What ``value`` is computed from, so far as it is ``needed``, or cheap and no longer in memory at call ``when``.

    Whoever read at ``when`` what else would be gone would have it held until then.
    """
    ends = {span.node: span.end for span in look.life.spans}

    def stays(node: fx.Node) -> bool:
        # What this round made is there; what is computed inside of its readers is as gone as what it is computed from.
        is_there = node not in look.life.at or ends.get(node, -1) >= when
        return node not in needed and (is_there or not look.is_repeatable(node) or nbytes(node) < WORTH_NBYTES)

    found = ancestors([value], lambda node: is_given(node) or stays(node))
    return {node for node in found if not stays(node)}


def _may_be_repeated(look: Look, node: fx.Node, inlined: Collection[fx.Node]) -> bool:
    """Whether ``node`` can be computed again: what is ``inlined`` is, for each of its readers, anyway."""
    return look.is_repeatable(node) or (node in inlined and is_cheap_call(node))


def _is_computed(node: fx.Node) -> bool:
    """Whether ``node`` is a call that makes tensors of tensors: sizes and constants need not be made again."""
    is_call = node.op == "call_function" and not is_given(node)
    return is_call and has_tensor(node) and any(map(has_tensor, node.all_input_nodes))


def _anchor(look: Look, reader: fx.Node, when: int) -> fx.Node | None:
    """What is made last between the peak and call ``when``, when ``reader`` runs, and is still there right before."""
    found: tuple[int, fx.Node] | None = None
    for span in look.life.spans:
        is_between = look.peak <= span.start < when <= span.end + 1 and span.node in look.depends
        if is_between and span.node.op == "call_function" and (found is None or span.start > found[0]):
            tensor = tensor_in(span)
            if tensor is not None and tensor < reader:
                found = span.start, tensor
    return found[1] if found else None
