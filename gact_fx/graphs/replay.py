"""Runs a backward graph again and again, with some of its values given."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import fx

from gact_fx.graphs.edit import ancestors, dependents
from gact_fx.graphs.interpreter import GraphInterpreter

Resume = Callable[[Any], list[Any]]
# (node, args, kwargs) -> value
Call = Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any]


class Replay:
    """A backward graph and its inputs in one step.

    ``given`` always maps names of nodes to what is used instead of computing them: values, or functions that make one
    when it is first read. ``inputs`` has the recorded values of the placeholders. Values are dropped after their last
    use. ``call`` runs one operator, by default as `GraphInterpreter` does.
    """

    def __init__(self, module: fx.GraphModule, arguments: Sequence[Any], call: Call | None = None) -> None:
        self._nodes = list(module.graph.nodes)
        interpreter = GraphInterpreter(module)
        self._call = call or (lambda node, args, kwargs: getattr(interpreter, node.op)(node.target, args, kwargs))
        placeholders = module.graph.find_nodes(op="placeholder")
        self.inputs = {node.name: value for node, value in zip(placeholders, arguments, strict=True)}
        self._dies: dict[fx.Node, list[fx.Node]] = {}
        for node in self._nodes:
            last = max(node.users) if node.users else node
            self._dies.setdefault(last, []).append(node)

    def evaluate(self, names: Collection[str], given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """The values of the named nodes on the recorded inputs, computing only what they need."""
        wanted = (node for node in self._nodes if node.name in names)
        needed = ancestors(wanted, lambda node: node.name in given)
        env: dict[fx.Node, Any] = {}
        for node in self._nodes:
            if node in needed:
                self._read(node, env, given)
        return {node.name: env[node] for node in needed if node.name in names}

    def run(self, given: Mapping[str, Any]) -> list[Any]:
        """Backward's outputs."""
        env: dict[fx.Node, Any] = {}
        for node in self._nodes[:-1]:
            self._step(node, env, given)
        return list(fx.map_arg(self._nodes[-1].args[0], lambda i: self._read(i, env, given)))

    def forks(self, given: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[str, Resume]]:
        """Yield (name, resume) in the order of first use; ``resume(value)`` finishes backward with that value.

        It gives the outputs that depend on the value, and None for the others: the gradient of a weight is all that
        what a linear layer read has a say in.
        """
        env: dict[fx.Node, Any] = {}
        for index, node in enumerate(self._nodes):
            for source in node.all_input_nodes:
                if source.name in names and min(source.users) is node:
                    yield source.name, partial(self._resume, index, source, env, given)
            self._step(node, env, given)

    def _resume(
        self, index: int, changed: fx.Node, env: Mapping[fx.Node, Any], given: Mapping[str, Any], value: Any
    ) -> list[Any]:
        """Outputs that depend on ``changed``, computed from the state ``env`` right before node ``index``."""
        depends = dependents(changed.graph, lambda node: node is changed)
        outputs = self._nodes[-1].args[0]
        needed = ancestors(i for i in outputs if i in depends)
        current = {**env, changed: value}
        for node in self._nodes[index:-1]:
            if node in needed:
                self._step(node, current, given)
        return [self._read(i, current, given) if i in depends else None for i in outputs]

    def _step(self, node: fx.Node, env: dict[fx.Node, Any], given: Mapping[str, Any]) -> None:
        if node.op in ("placeholder", "output"):
            return
        env[node] = self._value(node, env, given)
        for dead in self._dies.get(node, ()):
            env.pop(dead, None)

    def _read(self, node: fx.Node, env: dict[fx.Node, Any], given: Mapping[str, Any]) -> Any:
        # Inputs are fetched when they are first read, so that decompressed ones live no longer than they must.
        if node not in env:
            env[node] = self._value(node, env, given)
        return env[node]

    def _value(self, node: fx.Node, env: dict[fx.Node, Any], given: Mapping[str, Any]) -> Any:
        if node.name in given:
            value = given[node.name]
            return value() if callable(value) else value
        if node.op == "placeholder":
            return self.inputs[node.name]
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self._read(source, env, given))
        return self._call(node, args, kwargs)
