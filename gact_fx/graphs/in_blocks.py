"""Runs pointwise operators that follow one on another block by block, where a graph runs operator by operator.

What they make for one another is then as large as a block is. Compiled code never has it in memory; as whole tensors it
would be most of the peak of a step that is recorded.

Private, tried with torch 2.11 and 2.13: ``torch.utils._python_dispatch._get_current_dispatch_mode`` (public would be a
question whether somebody sees every operator that runs).
"""

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _get_current_dispatch_mode

from gact_fx.graphs.edit import copy_module
from gact_fx.graphs.operator_table import CASTS
from gact_fx.graphs.operators import OpOverload, packet_of, returns_alias, writes
from gact_fx.graphs.sizes import have_same_shape, hint
from gact_fx.graphs.trees import tree_leaves

# A tensor is cut into so many blocks at most, and what has fewer bytes not at all.
MOST_BLOCKS, LEAST_NBYTES = 16, 2**20
# What runs a few operators: it takes the arguments in one list, which it empties, and gives the results.
Run = Callable[[list[Any]], Any]


class Blocks:
    """Calls of pointwise operators as one function: of tensors, or numbers, a tuple of results of one shape.

    ``run`` makes the calls, of a block or of all.
    """

    def __init__(self, name: str, run: Run) -> None:
        self.__name__, self._run = name, run

    def __call__(self, *given: Any) -> Sequence[Any]:
        """The results."""
        return self.write(given, [])

    def write(self, given: Sequence[Any], over: Sequence[torch.Tensor]) -> Sequence[Any]:
        """The results, written where they fit to those of the tensors ``given`` that nobody else reads, ``over``."""
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        is_plain = all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in tensors)
        if not is_plain or _get_current_dispatch_mode() is not None or torch.is_grad_enabled():
            found: Sequence[Any] = self._run(list(given))
            return found
        shape = torch.broadcast_shapes(*(x.shape for x in tensors))
        # The first dimension that is long enough. Of two elements the strides tell where they lie; of one they do not.
        dimension = max(range(len(shape)), key=lambda d: (min(shape[d] // 2, MOST_BLOCKS), -d))
        size, count = shape[dimension], max(min(shape[dimension] // 2, MOST_BLOCKS), 1)
        free = [x for x in over if x.shape == shape and x.untyped_storage().nbytes() == x.nbytes]
        results: list[torch.Tensor] = []
        for low, high in ((size * at // count, size * (at + 1) // count) for at in range(count)):
            parts = self._run([_part(x, dimension - len(shape), size, low, high) for x in given])
            results = results or [_like(x, shape, free) for x in parts]
            for result, part in zip(results, parts, strict=True):
                result.narrow(dimension, low, high - low).copy_(part)
        return tuple(results)


def _part(x: Any, dimension: int, size: int, low: int, high: int) -> Any:
    """The block of ``x`` in a dimension that counts from the last, or all of it, where it is the same in all blocks."""
    has_blocks = isinstance(x, torch.Tensor) and x.dim() >= -dimension and x.shape[dimension] == size
    return x.narrow(dimension, low, high - low) if has_blocks else x


def _like(part: torch.Tensor, shape: Sequence[int], free: list[torch.Tensor]) -> torch.Tensor:
    """A tensor of that shape, its dimensions in memory in the order of a block's; one that is ``free`` if it can be."""
    strides, step = [0] * len(shape), 1
    for dimension in sorted(range(len(shape)), key=lambda d: (part.stride(d), part.shape[d], -d)):
        strides[dimension] = step
        step *= shape[dimension]
    for at, x in enumerate(free):
        if x.dtype == part.dtype and x.device == part.device and list(x.stride()) == strides:
            return free.pop(at)
    return torch.empty_strided(shape, strides, dtype=part.dtype, device=part.device)


def in_blocks(module: fx.GraphModule, interpret: Callable[[fx.GraphModule], Run]) -> fx.GraphModule:
    """A copy whose pointwise operators run block by block, where several follow one on another.

    The results, and their strides, are the same up to rounding. ``interpret`` gives what runs a few operators.
    """
    found = copy_module(module)
    for nodes in _runs(found.graph):
        _replace(found.graph, nodes, interpret)
    found.graph.lint()
    return found


def _runs(graph: fx.Graph) -> list[list[fx.Node]]:
    """Calls of which each reads one before it, with nothing in between but what is small and does not read them."""
    runs: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        last = runs[-1]
        is_member = _is_pointwise(node)
        reads = not set(last).isdisjoint(node.all_input_nodes)
        if is_member and (not last or (reads and have_same_shape(node.meta["val"], last[0].meta["val"]))):
            last.append(node)
        elif last and (reads or is_member or not _is_small(node)):
            runs.append([node] if is_member else [])
    return [nodes for nodes in runs if len(nodes) > 1]


def _is_pointwise(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or not isinstance(value, torch.Tensor) or value.dim() < 2:
        return False
    is_drawn = torch.Tag.nondeterministic_seeded in node.target.tags
    is_known = torch.Tag.pointwise in node.target.tags or packet_of(node) in CASTS
    # A clone's purpose may be its layout.
    is_plain = is_known and not (is_drawn or writes(node.target) or packet_of(node) is torch.ops.aten.clone)
    return is_plain and hint(value.numel()) * value.dtype.itemsize >= LEAST_NBYTES


def _is_small(node: fx.Node) -> bool:
    """Whether it makes no difference if ``node`` runs somewhat earlier."""
    if node.op != "call_function" or writes(node.target):
        return False
    values = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
    is_view = node.target is getitem or returns_alias(node.target)
    return is_view or all(hint(x.numel()) * x.dtype.itemsize < LEAST_NBYTES for x in values)


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
        blocks = Blocks(f"blocks_of_{nodes[-1].name}", interpret(fx.GraphModule({}, body)))
        call = graph.call_function(blocks, tuple(inputs))
    call.meta["val"] = tuple(node.meta["val"] for node in outputs)
    with graph.inserting_after(call):
        for at, node in enumerate(outputs):
            part = graph.call_function(getitem, (call, at))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part, delete_user_cb=lambda user: user not in nodes)
    for node in reversed(nodes):
        graph.erase_node(node)
