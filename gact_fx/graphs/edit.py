"""What several passes do to FX graphs: add a call together with its fake value, copy, follow dependences.

Undocumented, tried with torch 2.11 and 2.13: ``fake_mode`` of the fake tensors that AOTAutograd leaves in
``meta["val"]``, which passes use as well (public would be a function that propagates fake values to one new node).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from gact_fx.graphs.trees import tree_leaves


def add_call(graph: fx.Graph, target: Any, args: tuple[Any, ...], name: str, **kwargs: Any) -> fx.Node:
    """A call of ``target`` where ``graph`` inserts, with ``meta["val"]``; one argument must be a tensor node."""
    node = graph.create_node("call_function", target, args, kwargs, name=name)
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    values = tree_leaves([source.meta["val"] for source in node.all_input_nodes])
    tensor: Any = next(value for value in values if isinstance(value, torch.Tensor))
    with tensor.fake_mode:
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def restored(graph: fx.Graph, node: fx.Node, order: Sequence[int]) -> fx.Node:
    """``node``, whose dimensions are in ``order``, with its dimensions in their own."""
    if list(order) == sorted(order):
        return node
    inverse = sorted(range(len(order)), key=lambda d: order[d])
    return add_call(graph, torch.ops.aten.permute.default, (node, inverse), f"{node.name}_restored")


def latest(module: fx.GraphModule, nodes: list[fx.Node]) -> fx.Node:
    """The last of ``nodes``, but never a placeholder that others follow."""
    last: fx.Node = max([*nodes, module.graph.find_nodes(op="placeholder")[-1]])
    return last


def dependents(graph: fx.Graph, is_root: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """The nodes that are roots or depend on one."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_root(node) or any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes themselves, and all that they are computed from."""
    found = set(nodes)
    stack = list(found)
    while stack:
        new = [i for i in stack.pop().all_input_nodes if i not in found]
        found.update(new)
        stack.extend(new)
    return found


def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose graph can be edited by itself; tensors are shared."""
    return fx.GraphModule(module, copy.deepcopy(module.graph))
