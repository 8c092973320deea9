"""Have backward compute the two gradients of a convolution one after the other.

``aten.convolution_backward`` reads the arriving gradient, the input and the weight, and gives the gradients of all of
them. In truth only the weight's gradient needs the input. Computed first, by itself, that one frees the input, and the
copy that oneDNN makes of it, before there is memory for the input's gradient. Both are computed as before.

Convolutions in 16 bits stay whole. On a processor with AMX, split ones gave NaN in a small DenseNet under bfloat16
autocast; on one without AMX they did not. oneDNN's issue 5717 may be why: matrix products on AMX read beyond the end of
what they are given where its length is no multiple of 32, and NaN comes of what lies there.
"""

from operator import getitem
from typing import Any

import torch
from torch import fx

import gact_fx.graphs.convolution_gradient  # noqa: F401  (it defines the operator)
from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import add_call
from gact_fx.graphs.live_memory import nbytes
from gact_fx.graphs.sizes import is_symbolic
from gact_fx.graphs.workspace import copies_nbytes
from gact_fx.passes.backward_peak import Look
from gact_fx.passes.pipeline import Context

aten = torch.ops.aten
# A smaller input is not worth the second call, nor is a smaller share of the peak.
LEAST_NBYTES, LEAST_SHARE = 2**20, 0.02
# The share of the peak from which on a convolution is split.
NEAR = 0.8
_DTYPES = (torch.float32, torch.float64)


def split_convolutions(pair: GraphPair, context: Context) -> None:
    """Edit backward in place where the peak is near: two calls take somewhat longer than one."""
    graph, fused = pair.backward.graph, context.config.inner == "inductor"
    look = Look.at(pair, fused=fused)
    levels = dict(zip(look.life.calls, look.life.levels()[1:], strict=True))
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        parts = {user.args[1]: user for user in node.users if user.target is getitem}
        # Without Inductor, the copies that oneDNN makes are in the levels.
        is_near = levels[node] + fused * copies_nbytes(node) >= NEAR * look.level
        if 0 in parts and 1 in parts and is_near and _is_worth(node, look.level):
            _split(graph, node, parts[0])


def _is_worth(node: fx.Node, level: float) -> bool:
    arguments: tuple[Any, ...] = node.args
    gradient, source, weight, _, stride, padding, dilation, transposed, output_padding, groups, _ = arguments
    sizes = [size for x in (gradient, source, weight) for size in x.meta["val"].shape[2:]]
    # Of several groups, libraries compute transposed convolutions in other ways than gradients.
    is_plain = groups == 1 and gradient.meta["val"].dtype in _DTYPES and not any(map(is_symbolic, sizes))
    # One number for all dimensions; and a result so long that a strided convolution would give more than there was.
    is_short = len({len(sizes) // 3, *map(len, (stride, padding, dilation))}) > 1
    is_long = transposed and any(more >= step for more, step in zip(output_padding, stride, strict=False))
    if is_short or is_long:
        return False
    return is_plain and nbytes(source) >= max(LEAST_NBYTES, LEAST_SHARE * level)


def _split(graph: fx.Graph, node: fx.Node, part: fx.Node) -> None:
    arguments: tuple[Any, ...] = node.args
    gradient, _, weight, _, stride, padding, dilation, transposed, _, groups, mask = arguments
    node.args = (*arguments[:-1], [False, *mask[1:]])
    node.meta["val"] = (None, *node.meta["val"][1:])
    longer = [0] * len(stride) if transposed else _longer(*arguments[:7])
    how = (stride, padding, dilation, transposed, longer, groups, _is_channels_last(part.meta["val"]))
    # What reads the gradient may come before what takes the others out of the results.
    with graph.inserting_after(node):
        operator = torch.ops.gact_fx.convolution_gradient.default
        apart = add_call(graph, operator, (gradient, weight, *how), f"{part.name}_apart")
    part.replace_all_uses_with(apart)
    graph.erase_node(part)


def _longer(
    gradient: fx.Node, source: fx.Node, weight: fx.Node, bias: Any, stride: Any, padding: Any, dilation: Any
) -> list[int]:
    """By how much the input is longer, in each dimension, than the shortest one with a result of that size."""
    sizes = [x.meta["val"].shape[2:] for x in (source, gradient, weight)]
    every = zip(*sizes, stride, padding, dilation, strict=True)
    return [n - ((m - 1) * step - 2 * pad + gap * (k - 1) + 1) for n, m, k, step, pad, gap in every]


def _is_channels_last(x: torch.Tensor) -> bool:
    memory_format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return memory_format is not None and not x.is_contiguous() and x.is_contiguous(memory_format=memory_format)
