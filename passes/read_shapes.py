"""Have backward read no tensor where it needs its shape alone.

Operators of which this is all that they read of a tensor get one number, spread over that shape: so the tensor is
neither saved nor decoded for them. Sizes that vary are computed from those that backward is given: as a function of a
tensor's numbers, a size would be one that bends.
"""

from typing import Any

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import add_call, add_full
from gact_fx.graphs.sizes import SizeBuilder
from gact_fx.passes.pipeline import Context

aten = torch.ops.aten
# Operators of ``(gradient, input, ...)`` whose result depends on the input's shape, and on nothing else of it.
_READERS = (
    aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default, aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d_backward.default,
)  # fmt: skip
_SIZES = (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default)


def read_shapes(pair: GraphPair, context: Context) -> None:
    """Edit backward in place."""
    graph = pair.backward.graph
    for target in _READERS:
        for node in graph.find_nodes(op="call_function", target=target):
            like = node.args[1].meta["val"]
            if all(isinstance(size, int) for size in like.shape):
                with graph.inserting_before(node):
                    zero = add_full(graph, [], 0, like)
                    spread = add_call(graph, aten.expand.default, (zero, list(like.shape)), f"{node.name}_shape")
                node.args = (node.args[0], spread, *node.args[2:])
    sizes = SizeBuilder(graph)
    for target in _SIZES:
        for node in graph.find_nodes(op="call_function", target=target):
            if sizes.can_build([node.meta["val"]]):
                with graph.inserting_before(node):
                    (size,) = sizes.build([node.meta["val"]])
                _replace(node, size)
                graph.erase_node(node)


def _replace(node: fx.Node, size: Any) -> None:
    """Have everybody read ``size``, a node or a number, instead of ``node``."""
    for user in list(node.users):
        args, kwargs = fx.map_arg((user.args, user.kwargs), lambda i: size if i is node else i)
        user.args, user.kwargs = args, kwargs
