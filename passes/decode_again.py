"""Decode again, behind backward's peak, what would be held across the peak.

Backward reads a decoded tensor, or what is computed of several, at more than one place: for the weight of a later
layer, say, and at its own. The compiler makes such a value once and holds it in between.
"""

from torch import fx

from gact_fx.graphs.edit import ancestors
from gact_fx.graphs.live_memory import Span
from gact_fx.passes.backward_peak import Look, drop_unread, has_tensor, is_given, tensor_in

# (a value, who reads it)
_Edge = tuple[fx.Node, fx.Node]


def decode_again(look: Look) -> bool:
    """Edit the graph in place; returns whether anything that was held across the peak no longer is."""
    held = [span for span in look.live if span.end > look.peak and look.is_repeatable(span.node)]
    # Each, not only the first.
    return any([_split(look, span) for span in held])


def _split(look: Look, span: Span) -> bool:
    """Have those who read ``span`` behind the peak read what is computed again for them."""
    if not _is_computed(span.node):
        return False
    derived, edges = _reads(look, span.node)
    final = len(look.life.calls)
    when = {reader: look.life.at.get(reader, final) for _, reader in edges}
    late = sorted((edge for edge in edges if when[edge[1]] > look.peak), key=lambda edge: edge[1])
    if not late or len(late) == len(edges):
        return False
    anchor = _anchor(look, late[0][1], min(when[reader] for _, reader in late))
    below = ancestors([span.node], is_given)
    # What lies between the value and its readers, and what the value is computed from.
    wanted = [
        sorted(n for n in ancestors([value], is_given) if n in derived or (n in below and _is_computed(n)))
        for value, _ in late
    ]
    if anchor is None or not all(look.is_repeatable(node) for nodes in wanted for node in nodes):
        return False
    twins: dict[fx.Node, fx.Node] = {}
    for (value, reader), nodes in zip(late, wanted, strict=True):
        look.repeat(nodes, reader, anchor, twins)
        reader.replace_input_with(value, twins[value])
    drop_unread(twins)
    return True


def _reads(look: Look, node: fx.Node) -> tuple[set[fx.Node], list[_Edge]]:
    """What is computed of ``node`` and of saved values alone, ``node`` included; and who of the others reads that."""
    derived: set[fx.Node] = {node}
    edges: list[_Edge] = []
    for each in look.graph.nodes:
        sources = [source for source in each.all_input_nodes if source in derived]
        if sources and each.op == "call_function" and each not in look.depends and not is_given(each):
            derived.add(each)
        else:
            edges += [(source, each) for source in sources if not is_given(each)]
    return derived, edges


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
