"""Runs pointwise operators that follow one on another block by block, where a graph runs operator by operator.

What they make for one another, and for sums, is then as large as a block is. Compiled code never has it in memory; as
whole tensors it would be most of the peak of a step that is recorded.
"""

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from gact_fx.graphs.blocks import LEAST_NBYTES, Blocks, Rows, Run, Sum
from gact_fx.graphs.compute_again import compute_again
from gact_fx.graphs.edit import UncalledModule, copy_module, elements_nbytes
from gact_fx.graphs.operator_table import CASTS
from gact_fx.graphs.operators import OpOverload, name_of, packet_of, returns_alias, writes
from gact_fx.graphs.sizes import have_same_shape

# A result with less than this share of the bytes of what it is made of counts as small.
MUCH_LESS = 0.6
# Of a window's elements PyTorch computes eight bytes each for the position of the largest one, several times over.
_OF_ROWS = ("_low_memory_max_pool_with_offsets", "_low_memory_max_pool_offsets_to_indices")


def in_blocks(module: fx.GraphModule, interpret: Callable[[fx.GraphModule], Run]) -> fx.GraphModule:
    """A copy whose pointwise operators run block by block, where several follow one on another.

    The results, and their strides, are the same up to rounding. ``interpret`` gives what runs a few operators.
    """
    found = copy_module(module)
    compute_again(found.graph, {node for node in found.graph.nodes if _is_pointwise(node)})
    for nodes in _runs(found.graph):
        _replace(found.graph, nodes, interpret)
    for node in found.graph.nodes:
        if name_of(node.target) in _OF_ROWS:
            # One image, without rows, would be a batch of its channels, which do not depend on each other either.
            node.target = Rows(node.target)
    found.graph.lint()
    return found


def _runs(graph: fx.Graph) -> list[list[fx.Node]]:
    """Calls of which each reads one before it, with nothing in between but what is small and does not read them.

    Two that begin apart become one where a call reads both.
    """
    runs: list[list[fx.Node]] = [[]]
    # Whether nothing was between the last run and the one before.
    is_next = False
    for node in graph.nodes:
        last = runs[-1]
        sources = set(node.all_input_nodes)
        is_member, reads = _is_pointwise(node), not sources.isdisjoint(last)
        if _is_sum(node) and reads and _is_pointwise(node.args[0]):
            last.append(node)
        elif is_member and (not last or (reads and _may_join(node, last))):
            before = runs[-2] if is_next and last else []
            if not sources.isdisjoint(before) and _may_join(node, before):
                runs[-2:] = [[*before, *last]]
                is_next = False
            runs[-1].append(node)
        elif last and (reads or is_member or not _is_small(node)):
            is_next = is_member and not reads
            runs.append([node] if is_member else [])
        elif is_next and not sources.isdisjoint(runs[-2]):
            is_next = False
    return [nodes for nodes in runs if len(nodes) > 1]


def _may_join(node: fx.Node, run: Sequence[fx.Node]) -> bool:
    """Whether pointwise ``node`` is as large as what ``run`` makes, and needs none of its sums."""
    is_free = not any(_is_sum(source) and source in run for source in node.all_input_nodes)
    return is_free and have_same_shape(node.meta["val"], run[0].meta["val"])


def _is_sum(node: fx.Node) -> bool:
    """Whether ``node`` is a sum, not of all, that may be added up of sums of blocks."""
    if node.target is not torch.ops.aten.sum.dim_IntList or node.kwargs or not node.args[1]:
        return False
    dtypes = {each.meta["val"].dtype for each in (node, node.all_input_nodes[0])}
    # In 16 bits, sums of sums are rounded more often.
    return dtypes in ({torch.float32}, {torch.float64})


def _sum_of(node: fx.Node) -> Sum | None:
    if _is_pointwise(node):
        return None
    arguments: tuple[Any, ...] = node.args
    source, dims, *keeps = arguments
    return {d % source.meta["val"].dim() for d in dims}, bool(keeps and keeps[0])


def _is_pointwise(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or not isinstance(value, torch.Tensor) or value.dim() < 2:
        return False
    is_drawn = torch.Tag.nondeterministic_seeded in node.target.tags
    is_known = torch.Tag.pointwise in node.target.tags or packet_of(node) in CASTS
    # A clone's purpose may be its layout.
    is_plain = is_known and not (is_drawn or writes(node.target) or packet_of(node) is torch.ops.aten.clone)
    return is_plain and elements_nbytes(node) >= LEAST_NBYTES


def _is_small(node: fx.Node) -> bool:
    """Whether it makes next to no difference if ``node`` runs somewhat earlier: codes are held from there on anyway."""
    if node.op != "call_function" or writes(node.target):
        return False
    read = max((elements_nbytes(source) for source in node.all_input_nodes), default=0)
    is_view = node.target is getitem or returns_alias(node.target)
    return is_view or elements_nbytes(node) < max(LEAST_NBYTES, read * MUCH_LESS)


def _replace(graph: fx.Graph, nodes: Sequence[fx.Node], interpret: Callable[[fx.GraphModule], Run]) -> None:
    """Have one call make what the ``nodes`` make that others read."""
    inputs = list(dict.fromkeys(i for node in nodes for i in node.all_input_nodes if i not in nodes))
    outputs = [node for node in nodes if any(user not in nodes for user in node.users)]
    body, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for source in inputs:
        copies[source] = body.placeholder(source.name)
        copies[source].meta = dict(source.meta)
    for node in nodes:
        copies[node] = body.node_copy(node, copies.__getitem__)
    body.output(tuple(copies[node] for node in outputs))
    with graph.inserting_after(nodes[-1]):
        sums = [_sum_of(node) for node in outputs]
        blocks = Blocks(f"blocks_of_{nodes[-1].name}", interpret(UncalledModule({}, body)), sums)
        call = graph.call_function(blocks, tuple(inputs))
    call.meta["val"] = tuple(node.meta["val"] for node in outputs)
    with graph.inserting_after(call):
        for at, node in enumerate(outputs):
            part = graph.call_function(getitem, (call, at))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part, delete_user_cb=lambda user: user not in nodes)
    for node in reversed(nodes):
        graph.erase_node(node)
