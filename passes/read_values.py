"""Have backward read values from blobs, right before their first use."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import add_call
from gact_fx.graphs.sizes import SizeBuilder
from gact_fx.passes.load_blob import decompress, load_blob, replace_reads
from gact_fx.passes.merge_masks import fill_stopped
from gact_fx.passes.pipeline import Context
from gact_fx.passes.reads import InsteadRead, ValueRead
from gact_fx.passes.standardize import resolve, unstandardize


def read_values(pair: GraphPair, context: Context) -> None:
    """Edit ``pair.backward`` in place."""
    sizes = SizeBuilder(pair.backward.graph)
    nodes = {node.name: node for node in pair.backward.graph.nodes} | dict(context.exact_masks)
    for read in context.reads:
        if isinstance(read, InsteadRead):
            replace_reads(read.read, read.placeholder, set())
        elif isinstance(read, ValueRead):
            _load_values(read, sizes, nodes)


def _load_values(read: ValueRead, sizes: SizeBuilder, nodes: Mapping[str, fx.Node]) -> None:
    """``nodes``: those of backward by name, and in the place of masks those that stand for them."""
    value, like, graph = read.value, read.like, read.value.placeholder.graph
    replaced = [read.read, *(alias.placeholder for alias, _ in read.aliases)]
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
        views = []
        for alias, view in read.aliases:
            offset = view.storage_offset() - like.storage_offset()
            arguments = (dense, list(view.shape), list(view.stride()), offset)
            views.append(add_call(graph, torch.ops.aten.as_strided.default, arguments, f"{alias.name}_view"))
    replace_reads(read.read, values, {dense, values})
    for (alias, _), node in zip(read.aliases, views, strict=True):
        replace_reads(alias.placeholder, node, set())
