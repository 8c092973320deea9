"""Keep across the peak the part of a gradient that something waits for, and not all of it.

Where a network concatenates, as a U-Net does on each of its levels, backward takes the gradient of what came out apart
again. One part goes on at once. The other one waits until backward comes to where that was made, and it is a view: all
of the gradient waits with it. A copy of the part is smaller.
"""

from collections.abc import Sequence

import torch
from torch import fx

from gact_fx.graphs.edit import add_call
from gact_fx.graphs.live_memory import Span, storages
from gact_fx.graphs.operators import packet_of, returns_alias, writes
from gact_fx.graphs.sizes import hint
from gact_fx.passes.backward_peak import Look, behind, tensor_in

# The share of a tensor up to which its parts are copied.
_SHARE = 0.75


def keep_parts(look: Look) -> bool:
    """Edit the graph in place; returns whether there was anything of which parts alone are read behind the peak."""
    held = [span for span in look.live if span.start < look.peak < span.last and span.node in look.depends]
    aliases = [node for node in look.graph.nodes if returns_alias(node.target)] if held else []
    return any([_keep(look, span, aliases) for span in held])


def _keep(look: Look, span: Span, aliases: Sequence[fx.Node]) -> bool:
    whole = tensor_in(span)
    if whole is None or whole.op != "call_function":
        return False
    # What lies in the storage of the span, in the graph's order.
    views = [whole, *(node for node in aliases if node is not whole and span.key in storages(node))]
    late = []
    if any(writes(view.target) for view in views):
        return False
    for view in views:
        when = [look.life.at.get(user, len(look.life.calls)) for user in view.users if user not in views]
        if any(at == look.peak for at in when):
            return False
        if any(at > look.peak for at in when):
            late.append(view)
    parts = [_origin(view, whole) for view in late]
    if not late or any(path is None for path in parts):
        return False
    sizes = [hint(view.meta["val"].numel()) * view.meta["val"].dtype.itemsize for view in late]
    if sum(sizes) > _SHARE * span.nbytes:
        return False
    for view, path in zip(late, parts, strict=True):
        assert path is not None
        _copy(look, whole, view, path, views)
    return True


def _origin(view: fx.Node, whole: fx.Node) -> Sequence[fx.Node] | None:
    """The views of views that lead from ``whole`` to ``view``; None where one of these reads anything else."""
    path: list[fx.Node] = []
    while view is not whole:
        is_plain = view.op == "call_function" and packet_of(view) is not torch.ops.aten.as_strided
        if not is_plain or len(view.all_input_nodes) != 1:
            return None
        path.insert(0, view)
        (view,) = view.all_input_nodes
    return path


def _copy(look: Look, whole: fx.Node, view: fx.Node, path: Sequence[fx.Node], views: Sequence[fx.Node]) -> None:
    """Have the readers of ``view`` behind the peak read a copy that is made when ``whole`` is there."""
    copies = {whole: whole}
    source = whole
    for node in path:
        with look.graph.inserting_after(source):
            source = copies[node] = look.graph.node_copy(node, copies.__getitem__)
    with look.graph.inserting_after(source):
        part = add_call(look.graph, behind, (source, source), f"{view.name}_part")
    final = len(look.life.calls)
    late = [user for user in view.users if user not in views and look.life.at.get(user, final) > look.peak]
    for user in late:
        user.replace_input_with(view, part)
