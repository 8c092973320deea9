"""What several passes do to FX graphs: add a call together with its fake value, copy, follow dependences.

Undocumented, tried with torch 2.11 and 2.13: ``fake_mode`` of the fake tensors that AOTAutograd leaves in
``meta["val"]``, which passes use as well (public would be a function that propagates fake values to one new node).
"""

import copy
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from gact_fx.graphs.operators import packet_of
from gact_fx.graphs.sizes import hint
from gact_fx.graphs.trees import tree_leaves

aten = torch.ops.aten
# (target, args, name) -> a new call
Add = Callable[[Any, tuple[Any, ...], str], fx.Node]


def add_call(graph: fx.Graph, target: Any, args: tuple[Any, ...], name: str, **kwargs: Any) -> fx.Node:
    """A call of ``target`` where ``graph`` inserts, with ``meta["val"]``; one argument must be a tensor node."""
    node = graph.create_node("call_function", target, args, kwargs, name=name)
    infer(node)
    return node


def infer(node: fx.Node) -> None:
    """Give a call the fake value that follows from those of its arguments; one of these must be a tensor node."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    values = tree_leaves([source.meta["val"] for source in node.all_input_nodes])
    tensor: Any = next(value for value in values if isinstance(value, torch.Tensor))
    # What is decoded may have other strides than what was traced: compiled code and interpreters reshape it, too.
    target: Any = aten.reshape.default if node.target is aten.view.default else node.target
    with tensor.fake_mode:
        node.meta["val"] = target(*args, **kwargs)


def add_full(graph: fx.Graph, shape: list[int], number: float | fx.Node, like: Any) -> fx.Node:
    """A tensor full of ``number``, which may be a size that varies, where ``graph`` inserts.

    It has the dtype and device of the fake tensor ``like``.
    """
    # Not full_like, which Inductor would want decomposed.
    options = {"dtype": like.dtype, "device": like.device}
    node = graph.call_function(aten.full.default, (shape, number), options)
    value = number.meta["val"] if isinstance(number, fx.Node) else number
    with like.fake_mode:
        node.meta["val"] = aten.full.default(shape, value, **options)
    return node


def restored(graph: fx.Graph, node: fx.Node, order: Sequence[int]) -> fx.Node:
    """``node``, whose dimensions are in ``order``, with its dimensions in their own."""
    if list(order) == sorted(order):
        return node
    inverse = sorted(range(len(order)), key=lambda d: order[d])
    return add_call(graph, aten.permute.default, (node, inverse), f"{node.name}_restored")


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


def ancestors(nodes: Iterable[fx.Node], stop: Callable[[fx.Node], bool] = lambda node: False) -> set[fx.Node]:
    """The nodes themselves, and all that they are computed from, not looking behind those where it is to ``stop``."""
    found = set(nodes)
    stack = list(found)
    while stack:
        node = stack.pop()
        new = [] if stop(node) else [i for i in node.all_input_nodes if i not in found]
        found.update(new)
        stack.extend(new)
    return found


def behind(node: Any, packets: Container[Any]) -> Any:
    """What ``node`` came from, by any number of these operators of one tensor."""
    while packet_of(node) in packets:
        node = node.all_input_nodes[0]
    return node


def readers(node: fx.Node, packets: Container[Any]) -> list[fx.Node]:
    """What reads ``node``, or what any number of these operators of one tensor make of it."""
    return [r for user in node.users for r in (readers(user, packets) if packet_of(user) in packets else [user])]


def is_float(node: fx.Node) -> bool:
    """Whether ``node`` gives one floating-point tensor."""
    return is_float_tensor(node.meta.get("val"))


def is_float_tensor(value: object) -> bool:
    """Whether ``value`` is a floating-point tensor."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that ``node`` gives."""
    value = node.meta.get("val")
    # Nearly every node gives one tensor, for which walking a tree would take long.
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def numel(node: fx.Node) -> int:
    """Elements of the tensors that ``node`` gives, on the traced batch."""
    return sum(hint(x.numel()) for x in tensors_of(node))


def elements_nbytes(node: fx.Node) -> int:
    """Bytes of the tensors that ``node`` gives by their elements, wherever these lie, on the traced batch."""
    return sum(hint(x.numel()) * x.dtype.itemsize for x in tensors_of(node))


class UncalledModule(fx.GraphModule):
    """A module whose graph is edited and interpreted, never called: writing its Python code would take long."""

    def recompile(self) -> Any:
        """Writes no code."""


def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose graph can be edited and interpreted by itself; tensors are shared."""
    return UncalledModule(module, copy.deepcopy(module.graph))
