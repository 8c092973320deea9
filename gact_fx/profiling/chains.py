"""Chains: how backward's coefficients follow from one saved tensor, to be evaluated on other values of it."""

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from gact_fx.graphs.edit import ancestors, numel
from gact_fx.graphs.interpreter import GraphInterpreter
from gact_fx.graphs.linearity import is_pointwise
from gact_fx.graphs.operator_table import RESHAPES
from gact_fx.graphs.operators import packet_of
from gact_fx.graphs.sizes import hint

Values = dict[fx.Node, torch.Tensor]


def between(start: fx.Node, nodes: Collection[fx.Node], ends: Sequence[fx.Node]) -> list[fx.Node]:
    """Those of ``nodes`` by which ``ends`` follow from ``start``, in order."""
    needed = ancestors(ends, lambda node: node is start or node not in nodes)
    return [node for node in sorted(needed) if node in nodes and node is not start]


def is_elementwise(start: fx.Node, nodes: Collection[fx.Node], ends: Sequence[fx.Node]) -> bool:
    """Whether every element of an end follows from the one element of the start that lies at its place."""
    size, chain = numel(start), between(start, nodes, ends)
    inside = {start, *chain}
    return all(
        numel(node) == size
        and (_keeps_order(node) or is_pointwise(node))
        and all(numel(i) == size for i in node.all_input_nodes if i in inside)
        for node in chain
    )


def _keeps_order(node: fx.Node) -> bool:
    """Whether a node has the elements of its input in the same order."""
    # Sizes that vary are expanded to what they are.
    is_expansion = packet_of(node) is torch.ops.aten.expand and numel(node) == numel(node.all_input_nodes[0])
    return packet_of(node) in RESHAPES or is_expansion


class Chain:
    """What leads from ``start`` to ``ends`` by ``nodes``; ``outside`` has the values of what else these read."""

    def __init__(
        self,
        start: fx.Node,
        nodes: Collection[fx.Node],
        ends: Sequence[fx.Node],
        outside: Mapping[fx.Node, Any],
        interpreter: GraphInterpreter,
    ) -> None:
        self.start, self.ends = start, ends
        self._nodes = between(start, nodes, ends)
        self._outside = outside
        self.interpreter = interpreter
        self._dies: dict[fx.Node, list[fx.Node]] = {}
        inside = set(self._nodes)
        for node in [start, *self._nodes]:
            if node not in ends:
                self._dies.setdefault(max([u for u in node.users if u in inside], default=node), []).append(node)

    def evaluate(self, x: torch.Tensor, given: Mapping[fx.Node, torch.Tensor] = MappingProxyType({})) -> Values:
        """The ends, from ``x`` in the place of the start and what is ``given`` in the place of other nodes."""
        env: dict[fx.Node, Any] = {self.start: x, **given}
        for node in self._nodes:
            if node in given:
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda i: env[i] if i in env else self._outside[i])
            env[node] = self.interpreter.call_function(node.target, args, kwargs)
            for dead in self._dies.get(node, ()):
                if dead not in given:
                    env.pop(dead, None)
        return {node: env[node] for node in self.ends}

    def evaluate_at(
        self, x: torch.Tensor, positions: torch.Tensor, given: Mapping[fx.Node, torch.Tensor] = MappingProxyType({})
    ) -> Values:
        """The elements of the ends at flat ``positions``, from those of the start; only of an elementwise chain."""
        env: dict[fx.Node, Any] = {self.start: x, **given}
        for node in self._nodes:
            if node in given:
                continue
            if _keeps_order(node):
                env[node] = env[node.all_input_nodes[0]]
                continue
            shape = tuple(map(hint, node.meta["val"].shape))
            outside = {i: _picked(self._outside[i], shape, positions) for i in node.all_input_nodes if i not in env}
            args, kwargs = fx.map_arg((node.args, node.kwargs), {**env, **outside}.__getitem__)
            env[node] = self.interpreter.call_function(node.target, args, kwargs)
        return {node: env[node] for node in self.ends}


def _picked(value: Any, shape: tuple[int, ...], positions: torch.Tensor) -> Any:
    """Of ``value``, broadcast to ``shape``, the elements at flat ``positions``."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() == 1:
        return value.reshape(())
    if math.prod(shape) == value.numel():
        return value.reshape(-1)[positions]
    return torch.broadcast_to(value, shape)[torch.unravel_index(positions, shape)]
