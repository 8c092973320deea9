"""Runs a backward graph again and again, with some of its values given."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import fx

from gact_fx.graphs.edit import ancestors, dependents
from gact_fx.graphs.in_place import find_last_reads, write_over
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
        self._last_reads = find_last_reads(module.graph) if call is None else {}
        placeholders = module.graph.find_nodes(op="placeholder")
        self.inputs = {node.name: value for node, value in zip(placeholders, arguments, strict=True)}
        self._dies = _last_uses(self._nodes)
        self._dies_computed = _last_uses(self._nodes[:-1])
        # By node, the positions among backward's outputs.
        self._positions: dict[fx.Node, list[int]] = {}
        for position, node in enumerate(self._nodes[-1].args[0]):
            if isinstance(node, fx.Node):
                self._positions.setdefault(node, []).append(position)

    def evaluate(self, names: Collection[str], given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """The values of the named nodes on the recorded inputs, computing only what they need."""
        wanted = {node for node in self._nodes if node.name in names}
        needed = ancestors(wanted, lambda node: node.name in given)
        order = [node for node in self._nodes if node in needed]
        dies, env = _last_uses(order), dict[fx.Node, Any]()
        for node in order:
            self._read(node, env, given)
            for dead in dies.get(node, ()):
                if dead not in wanted:
                    env.pop(dead, None)
        return {node.name: env[node] for node in order if node in wanted}

    def run(self, given: Mapping[str, Any]) -> list[Any]:
        """Backward's outputs."""
        found = list(self._nodes[-1].args[0])
        for position, value in self.outputs(given):
            found[position] = value
        return found

    def outputs(self, given: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
        """Backward's outputs that are computed, each with its position, as soon as it is there."""
        env: dict[fx.Node, Any] = {}
        for node in self._nodes[:-1]:
            if node.op == "placeholder" and node not in self._positions:
                continue
            value = self._write_over(node, env, given)
            if value is None:
                value = self._read(node, env, given)
            env[node] = value
            for position in self._positions.get(node, ()):
                yield position, value
            del value
            for dead in self._dies_computed.get(node, ()):
                env.pop(dead, None)

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

    def _write_over(self, node: fx.Node, env: dict[fx.Node, Any], given: Mapping[str, Any]) -> Any:
        """The value of ``node`` in the place of what nobody reads after it; None where nothing is."""
        for source, maker in self._last_reads.get(node, {}).items():
            if not {node.name, source.name, maker.name} & given.keys():
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self._read(source, env, given))
                found = write_over(node, args, kwargs, env[source])
                if found is not None:
                    return found
        return None

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


def _last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """By node, what no later one of ``nodes`` reads, itself included."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        last.update(dict.fromkeys((node, *node.all_input_nodes), node))
    dies: dict[fx.Node, list[fx.Node]] = {}
    for node, at in last.items():
        dies.setdefault(at, []).append(node)
    return dies
