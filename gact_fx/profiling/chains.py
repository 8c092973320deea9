"""Chains: how backward's coefficients follow from one saved tensor, to be evaluated on other values of it."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from gact_fx.graphs.interpreter import GraphInterpreter
from gact_fx.profiling.elements import Elements, between, is_move, keeps_order

Values = dict[fx.Node, torch.Tensor]


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
            self._dies.setdefault(max([u for u in node.users if u in inside], default=node), []).append(node)

    def to(self, nodes: Collection[fx.Node], ends: Sequence[fx.Node]) -> "Chain":
        """From the same start to other ``ends``, by ``nodes``."""
        return Chain(self.start, nodes, ends, self._outside, self.interpreter)

    def evaluate(self, x: torch.Tensor, given: Mapping[fx.Node, torch.Tensor] = MappingProxyType({})) -> Values:
        """The ends, from ``x`` in the place of the start and what is ``given`` in the place of other nodes."""
        found = dict(self.results(x, given))
        return {node: found[node] for node in self.ends}

    def results(
        self, x: torch.Tensor, given: Mapping[fx.Node, torch.Tensor] = MappingProxyType({})
    ) -> Iterator[tuple[fx.Node, torch.Tensor]]:
        """Each end as soon as it is there; nothing is held longer than the nodes behind it need it."""
        env: dict[fx.Node, Any] = {self.start: x, **given}
        ends = set(self.ends)
        yield from ((node, env[node]) for node in self.ends if node in env)
        for node in self._nodes:
            if node in given:
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda i: env[i] if i in env else self._outside[i])
            env[node] = self.interpreter.call_function(node.target, args, kwargs)
            # They would be held until the next call.
            del args, kwargs
            if node in ends:
                yield node, env[node]
            for dead in self._dies.get(node, ()):
                if dead not in given:
                    env.pop(dead, None)

    def evaluate_at(
        self,
        x: torch.Tensor,
        elements: Mapping[fx.Node, Elements],
        given: Mapping[fx.Node, torch.Tensor] = MappingProxyType({}),
    ) -> Values:
        """Those ``elements`` of the ends that follow from elements ``x`` of the start; only of an elementwise chain."""
        env: dict[fx.Node, Any] = {self.start: x, **given}
        for node in self._nodes:
            # Results of a split are looked up one by one.
            if node in given or node not in elements:
                continue
            if keeps_order(node):
                env[node] = env[node.all_input_nodes[0]]
                continue
            if is_move(node):
                env[node] = self._moved(node, env, elements)
                continue
            at = elements[node]
            outside = {i: _picked(self._outside[i], at) for i in node.all_input_nodes if i not in env}
            args, kwargs = fx.map_arg((node.args, node.kwargs), {**env, **outside}.__getitem__)
            env[node] = self.interpreter.call_function(node.target, args, kwargs)
        return {node: env[node] for node in self.ends}

    def _moved(self, node: fx.Node, env: Mapping[fx.Node, Any], elements: Mapping[fx.Node, Elements]) -> torch.Tensor:
        source = node
        # A part of a split tensor has its elements from that tensor.
        while source not in env:
            source = next(i for i in source.all_input_nodes if i in env or i in self._nodes)
        taken = elements[node].taken
        assert taken is not None
        found: torch.Tensor = env[source][taken]
        return found


def _picked(value: Any, at: Elements) -> Any:
    """Of ``value``, broadcast to a shape, the elements ``at`` flat positions."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() == 1:
        return value.reshape(())
    if math.prod(at.shape) == value.numel():
        return value.reshape(-1)[at.positions]
    return torch.broadcast_to(value, at.shape)[torch.unravel_index(at.positions, at.shape)]
