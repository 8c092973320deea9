"""Have backward read values from blobs, right before their first use."""

import math
from collections.abc import Mapping
from functools import partial
from itertools import accumulate

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import add_call
from gact_fx.graphs.sizes import SizeBuilder
from gact_fx.passes.load_blob import decompress, load_blob, replace_reads
from gact_fx.passes.merge_masks import fill_stopped
from gact_fx.passes.pipeline import Context
from gact_fx.passes.reads import CoefficientsRead, ValueRead
from gact_fx.passes.standardize import resolve, unstandardize

aten = torch.ops.aten


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


def _channels_last(dense: fx.Node) -> fx.Node:
    """What lay in memory before it was coded channel by channel: views of it say where elements lay there."""
    order = [*range(1, dense.meta["val"].dim()), 0]
    moved = add_call(dense.graph, aten.permute.default, (dense, order), f"{dense.name}_moved")
    name = f"{dense.name}_in_memory"
    return add_call(dense.graph, aten.clone.default, (moved,), name, memory_format=torch.contiguous_format)


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
        if read.fill is not None:
            values = fill_stopped(values, read.fill, partial(add_call, graph))
        if read.standardization is not None:
            by = resolve(read.standardization, lambda name: nodes[name])
            values = unstandardize(values, by, partial(add_call, graph))
        memory = _channels_last(dense) if read.aliases and read.code.per_channel else dense
        views = []
        for alias in read.aliases:
            view = alias.source.meta["val"]
            shape, stride = sizes.build(view.shape), sizes.build(view.stride())
            (offset,) = sizes.build([view.storage_offset() - like.storage_offset()])
            arguments = (memory, shape, stride, offset)
            views.append(add_call(graph, aten.as_strided.default, arguments, f"{alias.name}_view"))
    replace_reads(value.placeholder, values, {dense, values})
    for alias, node in zip(read.aliases, views, strict=True):
        replace_reads(alias.placeholder, node, set())
