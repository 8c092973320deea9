"""Have backward read values from blobs, right before their first use."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import add_call, restored
from gact_fx.graphs.operators import packet_of
from gact_fx.graphs.sizes import SizeBuilder
from gact_fx.passes.load_blob import decompress, load_blob, replace_reads
from gact_fx.passes.merge_masks import fill_stopped
from gact_fx.passes.pipeline import Context
from gact_fx.passes.reads import CoefficientsRead, ValueRead
from gact_fx.passes.standardize import resolve, unstandardize

aten = torch.ops.aten
_PRODUCTS = frozenset({aten.mm, aten.bmm, aten.addmm, aten.baddbmm})


def read_values(pair: GraphPair, context: Context) -> None:
    """Edit ``pair.backward`` in place."""
    sizes = SizeBuilder(pair.backward.graph)
    nodes = {node.name: node for node in pair.backward.graph.nodes} | dict(context.exact_masks)
    for read in context.reads:
        if isinstance(read, ValueRead):
            _load_values(read, sizes, nodes)
        elif isinstance(read, CoefficientsRead):
            _load_coefficients(read, sizes)


def _load_coefficients(read: CoefficientsRead, sizes: SizeBuilder) -> None:
    graph, value = read.value.placeholder.graph, read.value
    shapes = [like.shape for like in read.like]
    ends = list(accumulate(math.prod(shape) for shape in shapes))
    users = [user for node in read.nodes for user in node.users if user.target is not decompress]
    if not users:
        return
    with graph.inserting_before(min(users)):
        flat, _ = load_blob(sizes, value, [ends[-1]], read.like[0].dtype, read.code, [0])
        parts = []
        for start, end, shape in zip([0, *ends], ends, shapes, strict=False):
            part = add_call(graph, aten.slice.Tensor, (flat, 0, *sizes.build([start, end])), f"{value.name}_part")
            parts.append(add_call(graph, aten.reshape.default, (part, sizes.build(shape)), f"{value.name}_coefficient"))
    for node, part in zip(read.nodes, parts, strict=True):
        replace_reads(node, part, {flat})


def _as_in_memory(dense: fx.Node, order: Sequence[int]) -> tuple[fx.Node, fx.Node]:
    """A tensor that was coded channel by channel, laid out as it was in memory, and with its dimensions in their order.

    Views of it, and kernels of libraries, rely on how it was laid out.
    """
    graph, memory = dense.graph, [*range(1, len(order)), 0]
    moved = add_call(graph, aten.permute.default, (dense, memory), f"{dense.name}_moved")
    name = f"{dense.name}_laid_out"
    laid_out = add_call(graph, aten.clone.default, (moved,), name, memory_format=torch.contiguous_format)
    return laid_out, restored(graph, laid_out, [order[d] for d in memory])


def _bears_channels_apart(user: fx.Node, value: fx.Node) -> bool:
    """Whether ``user`` of ``value`` computes the same, and as fast, where neighbouring channels do not lie together.

    Products do, and do so behind a transposition, or a view that leaves the last dimension as it is.
    """
    if packet_of(user) in _PRODUCTS:
        return True
    if packet_of(user) in (aten.t, aten.transpose, aten.permute):
        return all(packet_of(behind) in _PRODUCTS for behind in user.users)
    if packet_of(user) not in (aten.view, aten.reshape, aten._unsafe_view):
        return False
    last = user.meta["val"].shape[-1:] == value.meta["val"].shape[-1:]
    return last and all(_bears_channels_apart(behind, user) for behind in user.users)


def _all_bear_channels_apart(read: ValueRead, users: Sequence[fx.Node]) -> bool:
    """Whether nobody minds how ``read`` lies: no view of the same memory, and all other dimensions in their order."""
    are_in_order = list(read.order[1:]) == list(range(len(read.order) - 1))
    value = read.value.placeholder
    return not read.aliases and are_in_order and all(_bears_channels_apart(user, value) for user in users)


def _load_values(read: ValueRead, sizes: SizeBuilder, nodes: Mapping[str, fx.Node]) -> None:
    """``nodes``: those of backward by name, and in the place of masks those that stand for them."""
    value, graph = read.value, read.value.placeholder.graph
    like = value.source.meta["val"]
    replaced = [value.placeholder, *(alias.placeholder for alias in read.aliases)]
    users = [user for node in replaced for user in node.users if user.target is not decompress]
    if not users:
        return
    with graph.inserting_before(min(users)):
        dense, values = load_blob(sizes, value, like.shape, like.dtype, read.code, read.order)
        if read.code.per_channel and not _all_bear_channels_apart(read, users):
            dense, values = _as_in_memory(dense, read.order)
        if read.fill is not None:
            values = fill_stopped(values, read.fill, partial(add_call, graph))
        if read.standardization is not None:
            by = resolve(read.standardization, lambda name: nodes[name])
            values = unstandardize(values, by, partial(add_call, graph))
        views = []
        for alias in read.aliases:
            view = alias.source.meta["val"]
            shape, stride = sizes.build(view.shape), sizes.build(view.stride())
            (offset,) = sizes.build([view.storage_offset() - like.storage_offset()])
            arguments = (dense, shape, stride, offset)
            views.append(add_call(graph, aten.as_strided.default, arguments, f"{alias.name}_view"))
    replace_reads(value.placeholder, values, {dense, values})
    for alias, node in zip(read.aliases, views, strict=True):
        replace_reads(alias.placeholder, node, set())
