"""Measure how much each saved tensor's rounding error moves the gradient (GACT, Algorithm 1).

The gradient is computed with every eligible tensor quantized; then, tensor by tensor, again with only that tensor's seed
changed. Half the squared distance of the two gradients estimates the variance that the tensor contributes at this width,
and dividing by ``S(b) = 1 / (2^b - 1)^2`` gives its sensitivity c_l.

Only backward is run again, and of backward only what comes after the tensor's first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from gact_fx import ops
from gact_fx.aot import GraphPair
from gact_fx.plan import slot_seed
from gact_fx.records import GraphAnalysis

PROBE_BITS = 4


def step_variance(bits: int) -> float:
    """S(b) = 1 / (2^b - 1)^2: the variance of b-bit codes relative to the squared range (GACT, equation 4)."""
    return 1.0 / (2**bits - 1) ** 2


def measure_sensitivity(
    pair: GraphPair,
    analysis: GraphAnalysis,
    arguments: Sequence[Any],
    *,
    group_size: int,
    seed: int = 0,
    draws: int = 1,
    progress: Callable[[int], None] = lambda count: None,
) -> dict[str, float]:
    """Sensitivity c_l of every tensor to be quantized, in units of squared gradient.

    ``arguments`` are backward's inputs of a real step, in the order of its placeholders: the exact saved values and the
    tangents. The gradient is everything that backward returns. ``progress`` is called with 1 after each tensor.
    """
    replay = _Replay(pair.backward, arguments)
    masks = {mask for how in analysis.eligibility for mask in how.masks}
    exact = replay.evaluate(masks)
    tensors = {tensor.name: how.order for tensor, how in analysis.quantized()}

    def quantized(name: str, draw: int) -> torch.Tensor:
        value = replay.inputs[name]
        dense = value.permute(tensors[name])
        blob = ops.compress(dense, PROBE_BITS, group_size, slot_seed(seed, f"probe {draw}", name))
        rounded = ops.decompress(blob, dense.shape, value.dtype, PROBE_BITS, group_size)
        return rounded.permute(sorted(range(dense.dim()), key=lambda d: tensors[name][d]))

    base_inputs = {name: quantized(name, 0) for name in tensors}
    base = replay.run({**exact, **base_inputs})
    sensitivities: dict[str, float] = {}
    for name, resume in replay.forks({**exact, **base_inputs}, tensors):
        distance = 0.0
        for draw in range(1, draws + 1):
            distance += _squared_distance(base, resume(quantized(name, draw)))
        sensitivities[name] = 0.5 * distance / draws / step_variance(PROBE_BITS)
        progress(1)
    # Tensors that backward never reads add nothing.
    return {name: sensitivities.get(name, 0.0) for name in tensors}


def _squared_distance(left: Sequence[Any], right: Sequence[Any]) -> float:
    total = 0.0
    for a, b in zip(left, right, strict=True):
        if isinstance(a, torch.Tensor) and a.dtype.is_floating_point and a is not b:
            total += float((a - b).double().square().sum())
    return total


class _Replay:
    """Runs a backward graph again and again, with some of its values given."""

    def __init__(self, module: fx.GraphModule, arguments: Sequence[Any]) -> None:
        self._nodes = list(module.graph.nodes)
        self._interpreter = fx.Interpreter(module)
        placeholders = module.graph.find_nodes(op="placeholder")
        self.inputs = {node.name: value for node, value in zip(placeholders, arguments, strict=True)}
        self._dies: dict[fx.Node, list[fx.Node]] = {}
        for node in self._nodes:
            last = max(node.users) if node.users else node
            self._dies.setdefault(last, []).append(node)

    def evaluate(self, names: set[str]) -> dict[str, Any]:
        """The values of the named nodes on the exact inputs, computing only what they need."""
        needed = {node for node in self._nodes if node.name in names}
        stack = list(needed)
        while stack:
            new = [i for i in stack.pop().all_input_nodes if i not in needed]
            needed.update(new)
            stack.extend(new)
        env: dict[fx.Node, Any] = {}
        for node in self._nodes:
            if node in needed:
                env[node] = self._value(node, env, {})
        return {node.name: env[node] for node in needed if node.name in names}

    def run(self, given: Mapping[str, Any]) -> list[Any]:
        """Backward's outputs, with the values in ``given`` instead of their nodes'."""
        return self._resume(0, {}, given)

    def forks(self, given: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
        """Yield (tensor, resume) in the order of first use: ``resume(value)`` finishes backward with another value."""
        env: dict[fx.Node, Any] = {}
        for index, node in enumerate(self._nodes):
            for name in dict.fromkeys(i.name for i in node.all_input_nodes if i.op == "placeholder" and i.name in names):
                placeholder = next(i for i in node.all_input_nodes if i.name == name)
                if min(placeholder.users) is node:

                    def resume(value: Any, at: int = index, slot: fx.Node = placeholder) -> list[Any]:
                        return self._resume(at, {**env, slot: value}, given)

                    yield name, resume
            if node.op == "output":
                return
            self._step(node, env, given)

    def _resume(self, index: int, env: dict[fx.Node, Any], given: Mapping[str, Any]) -> list[Any]:
        for node in self._nodes[index:-1]:
            self._step(node, env, given)
        return list(fx.map_arg(self._nodes[-1].args[0], lambda i: env[i]))

    def _step(self, node: fx.Node, env: dict[fx.Node, Any], given: Mapping[str, Any]) -> None:
        env[node] = self._value(node, env, given)
        for dead in self._dies.get(node, ()):
            env.pop(dead, None)

    def _value(self, node: fx.Node, env: Mapping[fx.Node, Any], given: Mapping[str, Any]) -> Any:
        if node.name in given:
            return given[node.name]
        if node.op == "placeholder":
            return self.inputs[node.name]
        load: Callable[[fx.Node], Any] = lambda i: env[i]  # noqa: E731
        args, kwargs = fx.map_arg(node.args, load), fx.map_arg(node.kwargs, load)
        return getattr(self._interpreter, node.op)(node.target, args, kwargs)
