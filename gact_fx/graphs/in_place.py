"""Writes what an operator makes over what it is the last to read, where a graph runs operator by operator.

Compiled code does that anyway. Here pointwise operators do it, which may write where they read.
"""

from collections.abc import Mapping
from operator import getitem
from typing import Any

import torch
from torch import fx

from gact_fx.graphs.blocks import Blocks, is_watched
from gact_fx.graphs.interpreter import GraphInterpreter
from gact_fx.graphs.operator_table import CASTS, LIBRARY
from gact_fx.graphs.operators import MAKES_MEMORY, OpOverload, name_of, packet_of, returns_alias, writing_form
from gact_fx.graphs.sizes import have_same_shape, hint, is_same
from gact_fx.graphs.trees import tree_leaves

# As `GraphInterpreter` runs them, they may return memory that they read, whatever their schema says.
_VIEWS = frozenset({"aten.view.default", "aten._unsafe_view.default", "gact_fx.behind.default"})


class InPlaceInterpreter(GraphInterpreter):
    """A `GraphInterpreter` whose pointwise operators write over what nobody reads after them."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._last_reads = find_last_reads(module.graph)

    def run_node(self, n: fx.Node) -> Any:
        """The node's value."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if isinstance(n.target, Blocks):
            return n.target.write(args, [self.env[source] for source in self._last_reads.get(n, {})])
        for source in self._last_reads.get(n, {}):
            found = write_over(n, args, kwargs, self.env[source])
            if found is not None:
                return found
        return getattr(self, n.op)(n.target, args, kwargs)


def find_last_reads(graph: fx.Graph) -> Mapping[fx.Node, Mapping[fx.Node, fx.Node]]:
    """By pointwise operator, what it is the last to read of what the graph itself made, with the call that made it."""
    # By node, the calls, or inputs, whose memory its value may lie in.
    makers: dict[fx.Node, frozenset[fx.Node]] = {}
    last: dict[fx.Node, fx.Node] = {}
    # Of several results of one call each is memory of its own.
    results: dict[tuple[Any, ...], fx.Node] = {}
    for node in graph.nodes:
        read = frozenset[fx.Node]().union(*(makers[source] for source in node.all_input_nodes))
        is_view = node.target is getitem or returns_alias(node.target) or str(node.target) in _VIEWS
        is_result = node.target is getitem and _makes_results(node.all_input_nodes[0])
        maker = results.setdefault(node.args, node) if is_result else node
        is_size = isinstance(node.meta.get("val"), int | torch.SymInt)
        makers[node] = frozenset() if is_size else read if is_view and not is_result else frozenset({maker})
        last.update(dict.fromkeys(read, node))
    found: dict[fx.Node, dict[fx.Node, fx.Node]] = {}
    for node in graph.nodes:
        if writing_form(node.target) is None and not isinstance(node.target, Blocks):
            continue
        # A size is in no memory.
        for source in (each for each in node.all_input_nodes if makers[each]):
            maker, *others = makers[source]
            # A row of what is written, say, which other elements read as well.
            is_shared = any(maker in makers[other] for other in node.all_input_nodes if other is not source)
            if not others and not is_shared and last[maker] is node and _makes_memory(maker):
                found.setdefault(node, {})[source] = maker
    return found


def write_over(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], over: Any) -> Any:
    """What pointwise ``node`` makes of its arguments, written to ``over``, which is one of them.

    None where the result would be of another type or otherwise laid out than ``over``, and where a mode sees every
    value: selective checkpointing keeps some of them.
    """
    if is_watched():
        return None
    value, form = node.meta.get("val"), writing_form(node.target)
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if form is None or not isinstance(value, torch.Tensor) or any(x.requires_grad for x in tensors):
        return None
    is_of_type = over.dtype == value.dtype and over.device.type == value.device.type and not over.is_conj()
    is_whole = is_of_type and over.untyped_storage().nbytes() == over.nbytes
    is_alike = all(x.stride() == over.stride() for x in tensors if x.shape == over.shape)
    if not is_whole or not is_alike or torch.broadcast_shapes(*(x.shape for x in tensors)) != over.shape:
        return None
    run, name = form
    return run(*args, **kwargs, **{name: over})


def fits(node: fx.Node, source: fx.Node) -> bool:
    """Whether `write_over` has ``node`` write to ``source``, by what was traced."""
    value, over = node.meta.get("val"), source.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(over, torch.Tensor) or value.dtype != over.dtype:
        return False
    tensors = [x for x in (i.meta.get("val") for i in node.all_input_nodes) if isinstance(x, torch.Tensor)]
    alike = [x for x in tensors if have_same_shape(x, over)]
    is_whole = hint(over.untyped_storage().nbytes()) == hint(over.numel()) * over.dtype.itemsize
    is_alike = all(is_same(a, b) for x in alike for a, b in zip(x.stride(), over.stride(), strict=True))
    return is_whole and have_same_shape(value, over) and is_alike


def _makes_memory(node: fx.Node) -> bool:
    """Whether ``node`` is known to return memory that nobody else has."""
    if node.op != "call_function":
        return False
    if node.target is getitem:
        return _makes_results(node.all_input_nodes[0])
    is_own = isinstance(node.target, OpOverload) and node.target.namespace == "gact_fx"
    is_copy = packet_of(node) is torch.ops.aten.cat or name_of(node.target) == "inductor_random" or _changes_dtype(node)
    is_known = is_own or is_copy or packet_of(node) in LIBRARY or writing_form(node.target) is not None
    return is_known or getattr(node.target, MAKES_MEMORY, False)


def _makes_results(node: fx.Node) -> bool:
    """Whether ``node`` returns several tensors, each in memory of its own."""
    return isinstance(node.target, Blocks) or packet_of(node) in LIBRARY


def _changes_dtype(node: fx.Node) -> bool:
    """Whether ``node`` is a cast to another dtype; one to the same may return what it was given."""
    if packet_of(node) not in CASTS:
        return False
    value, source = (each.meta.get("val") for each in (node, node.all_input_nodes[0]))
    return isinstance(value, torch.Tensor) and isinstance(source, torch.Tensor) and value.dtype != source.dtype
