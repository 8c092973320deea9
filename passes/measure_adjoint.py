"""Measure how much each saved tensor's rounding error moves the gradient, for all tensors at once.

The backward graph is a function of what was saved, and autograd can differentiate it. For a random v with independent
entries +-1, ``E_v (v^T J_l)_i^2 = sum_j J_ji^2`` is the squared sensitivity of the whole gradient to element i of
tensor l (Hutchinson's estimator of the diagonal of ``J^T J``), and one reverse pass gives it for every tensor of every
graph. The cost does not grow with the number of tensors. GACT's Algorithm 1 (`measure_sensitivity`) is its oracle.

So that it fits where training does, what this second differentiation saves is stored in 8 bits.

What passes through an operator without a second derivative is left for Algorithm 1: its derivative would be silently
incomplete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from gact_fx.interpreter import GraphInterpreter
from gact_fx.passes.measure_rounding import RoundingMeter
from gact_fx.replay import Replay
from gact_fx.saved_tensors import compressed_saved_tensors
from gact_fx.tape import Step

# Operators that make a float tensor from the shape of another, and rightly have no derivative.
_SHAPE_ONLY = ("full_like", "zeros_like", "ones_like", "empty_like", "new_zeros", "new_full", "new_ones", "new_empty")


def measure_adjoint(
    steps: Sequence[Step], *, probes: int, seed: int = 0
) -> list[tuple[dict[str, RoundingMeter], frozenset[str]]]:
    """Per step: the meter of every compressed tensor, by name, and the names that need Algorithm 1.

    ``steps`` are the graphs of one training step in forward's order; ``probes`` is the number of random v.
    """
    tapes = [_AdjointStep(step) for step in steps]
    outputs: list[torch.Tensor] = []
    flowing: dict[tuple[int, str], torch.Tensor] = {}
    sources: dict[tuple[int, str], frozenset[tuple[int, str]]] = {}
    with torch.enable_grad():
        for index in reversed(range(len(steps))):
            tangents = {name: value for (at, name), value in flowing.items() if at == index}
            known = {name: found for (at, name), found in sources.items() if at == index}
            results, reached = tapes[index].run(index, tangents, known)
            for position, value in enumerate(results):
                if not (isinstance(value, torch.Tensor) and value.requires_grad):
                    continue
                if position not in steps[index].flows:
                    outputs.append(value)
                    continue
                target = steps[index].flows[position]
                # What was recorded stays the value; an output read by several graphs gets all of their derivatives.
                start = flowing.get(target, tapes[target[0]].recorded(target[1]))
                value = value.reshape(start.shape)
                flowing[target] = start + (value - value.detach()).to(start.dtype)
                sources[target] = sources.get(target, frozenset()) | reached[position]
        _probe(outputs, [leaf for tape in tapes for leaf in tape.leaves.values()], probes, seed)
    opaque = frozenset().union(*(tape.opaque for tape in tapes)) if tapes else frozenset()
    return [(tape.meters, frozenset(name for at, name in opaque if at == i)) for i, tape in enumerate(tapes)]


def _probe(outputs: list[torch.Tensor], leaves: list[torch.Tensor], probes: int, seed: int) -> None:
    if not outputs or not leaves:
        return
    generators = {o.device: torch.Generator(o.device).manual_seed(seed) for o in outputs}
    for probe in range(probes):
        signs = [torch.empty_like(o).random_(0, 2, generator=generators[o.device]).mul_(2).sub_(1) for o in outputs]
        # The leaves' hooks take each derivative as soon as it is complete.
        torch.autograd.backward(outputs, signs, inputs=leaves, retain_graph=probe + 1 < probes)


class _AdjointStep:
    """One graph's backward pass, run so that autograd can differentiate it."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._interpreter = GraphInterpreter(step.backward, differentiable=True)
        # Parameters among the arguments must not collect gradients.
        arguments = [a.detach() if isinstance(a, torch.Tensor) else a for a in step.arguments]
        self._replay = Replay(step.backward, arguments, self._call)
        self.opaque: set[tuple[int, str]] = set()
        self.meters: dict[str, RoundingMeter] = {}
        self.leaves: dict[str, torch.Tensor] = {}
        self._sources: dict[fx.Node, frozenset[tuple[int, str]]] = {}
        self._nodes = {node.name: node for node in step.backward.graph.nodes}
        with torch.no_grad():
            values = self._replay.evaluate(set(step.readings))
        for name, tensor in step.readings.items():
            leaf = values[name].detach().requires_grad_()
            self.leaves[name] = leaf
            self.meters[tensor] = meter = RoundingMeter(leaf)
            leaf.register_post_accumulate_grad_hook(_taker(meter))

    def recorded(self, tangent: str) -> torch.Tensor:
        value: torch.Tensor = self._replay.inputs[tangent]
        return value

    def run(
        self, index: int, tangents: dict[str, torch.Tensor], sources: dict[str, frozenset[tuple[int, str]]]
    ) -> tuple[list[Any], list[frozenset[tuple[int, str]]]]:
        """Backward's outputs, and for each the tensors (step, name) that it depends on."""
        given = {self._nodes[name]: frozenset({(index, tensor)}) for name, tensor in self._step.readings.items()}
        given.update({self._nodes[name]: found for name, found in sources.items()})
        for node in self._nodes.values():
            inputs = frozenset().union(*(self._sources[i] for i in node.all_input_nodes))
            self._sources[node] = given.get(node, inputs)
        with compressed_saved_tensors():
            results = self._replay.run({**self.leaves, **tangents})
        returned = self._step.backward.graph.output_node().args[0]
        return results, [
            self._sources[node] if isinstance(node, fx.Node) else frozenset()
            for node in returned  # type: ignore[union-attr]
        ]

    def _call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = getattr(self._interpreter, node.op)
        try:
            result = run(node.target, args, kwargs)
        except RuntimeError as error:
            # Some operators already refuse arguments that require a gradient.
            if "differentiable" not in str(error):
                raise
            self.opaque |= self._sources[node]
            return run(node.target, *tree_map(_detached, (args, kwargs)))
        if node.op == "call_function" and torch.is_grad_enabled() and _ends_derivative(node, (args, kwargs), result):
            self.opaque |= self._sources[node]
            return tree_map(_detached, result)
        return result


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


def _ends_derivative(node: fx.Node, arguments: Any, result: Any) -> bool:
    """Whether autograd cannot go through what was called, or would silently stop there."""
    if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in tree_leaves(arguments)):
        return False
    floats = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.dtype.is_floating_point]
    inputs = [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor) and x.requires_grad]
    if any(x.grad_fn is not None and _refuses(x, inputs) for x in floats):
        return True
    return any(not x.requires_grad for x in floats) and _name(node) not in _SHAPE_ONLY


def _name(node: fx.Node) -> str:
    return getattr(node.target, "_opname", "")


def _refuses(result: torch.Tensor, inputs: list[torch.Tensor]) -> bool:
    """Whether the derivative of a result cannot be computed, which some operators only say when it is."""
    assert result.grad_fn is not None
    name = result.grad_fn.name()
    if "NotImplemented" in name or "NotSupported" in name:
        return True
    if not name.startswith("GeneratedBackwardFor"):
        return False
    try:
        torch.autograd.grad(result.sum(), inputs, retain_graph=True, allow_unused=True)
    except RuntimeError:
        return True
    return False


def _taker(meter: RoundingMeter) -> Any:
    def take(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        meter.add(leaf.grad)
        leaf.grad = None

    return take
