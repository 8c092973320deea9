"""Spell compress and decompress out in PyTorch operations, so that Inductor fuses them with their neighbours.

A decompression then melts into the kernels that read its values, a compression into the one that makes them. The
operations are those of `gact_fx.codec.reference`. The compiled operators read and write each tensor once;
what is fused is computed anew wherever it is read. Which is faster is for measurement to say
(``benchmarks/kernels.py``); `gact_fx.config.Config.fuse` chooses.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from gact_fx.codec import reference
from gact_fx.codec.operators import has_compiled_kernels
from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.compilers import decompositions
from gact_fx.graphs.tracing import trace
from gact_fx.passes.pipeline import Context

_SPELLED_OUT: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.gact_fx.compress.default: reference.compress_whole,
    torch.ops.gact_fx.decompress.default: reference.decompress_whole,
}


def fuse_codec(pair: GraphPair, context: Context) -> int:
    """Replace the operators in place, where the configuration or the device asks for it; returns how many."""
    # The inner compiler's own: graphs that come out of the partitioner are not decomposed again.
    table = decompositions()
    nodes = [node for module in (pair.forward, pair.backward) for node in module.graph.nodes]
    found = [node for node in nodes if is_spelled_out(node, context)]
    for node in found:
        _inline(node, table)
    return len(found)


def fuses(context: Context) -> bool:
    """Whether Inductor gets the graphs, and may find operators spelled out."""
    return context.config.inner == "inductor" and context.config.fuse != "off" and not context.is_profiling


def is_spelled_out(node: fx.Node, context: Context) -> bool:
    """Whether ``node`` is one of the operators, and is to be replaced."""
    if node.target not in _SPELLED_OUT or not fuses(context):
        return False
    if "rotated" in node.args:
        # A rotation mixes all elements of a group, again and again: there is nothing to fuse.
        return False
    return context.config.fuse == "on" or not has_compiled_kernels(node.meta["val"].device.type)


def _inline(node: fx.Node, decompositions: Mapping[Any, Callable[..., Any]]) -> None:
    """Put the operations that ``node`` stands for in its place."""
    graph, inputs = node.graph, node.all_input_nodes

    def spelled_out(*values: Any) -> torch.Tensor:
        given = dict(zip(inputs, values, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: given[n])
        return _SPELLED_OUT[node.target](*args, **kwargs)

    values = [n.meta["val"] for n in inputs]
    tensor: Any = next(value for value in values if isinstance(value, torch.Tensor))
    with tensor.fake_mode:
        traced = trace(spelled_out, values, decompositions)
    twins: dict[fx.Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with graph.inserting_before(node):
        for step in traced.graph.nodes:
            if step.op == "output":
                node.replace_all_uses_with(twins[step.args[0]])
            elif step.op != "placeholder":
                twins[step] = graph.node_copy(step, lambda n: twins[n])
                # Constants that tracing lifts would be attributes of the traced module.
                assert step.op == "call_function", f"{step.format_node()} in a spelled-out {node.name}"
    graph.erase_node(node)
