"""Measure how much each saved tensor's rounding error moves the gradient (GACT, Algorithm 1).

The slow way, one backward pass a tensor: the oracle of `measure_adjoint`, and what serves tensors that pass through an
operator without a second derivative. The gradient is computed with every eligible tensor quantized; then, tensor by
tensor, again with only that tensor's seed changed. Half the squared distance of the two gradients estimates the
variance that the tensor contributes at this width; divided by ``S(b) = 1 / (2^b - 1)^2`` it is its sensitivity c_l.

The gradient is that of the whole model: what a graph changes in the gradients of its inputs is carried through the
earlier graphs, whose backward passes are linear in their tangents. Only backward is run again, and of the tensor's own
graph only what comes after its first use.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from gact_fx.codec import operators
from gact_fx.codec.code import step_variance
from gact_fx.graphs.replay import Replay
from gact_fx.plan import tensor_seed
from gact_fx.profiling.gradient_changes import GradientChanges, difference
from gact_fx.profiling.rounding_meter import REFERENCE
from gact_fx.profiling.tape import Step


def measure_sensitivity(
    steps: Sequence[Step],
    *,
    seed: int = 0,
    draws: int = 1,
    only: Sequence[frozenset[str]] | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> list[dict[str, float]]:
    """Sensitivity c_l of every quantized tensor, per step, in units of squared gradient.

    ``steps`` are the graphs of one training step in forward's order; ``only`` names, per step, the tensors to measure.
    ``progress`` is called with 1 after each tensor. Masks are exact throughout, as they are in training.
    """
    probes = [_Probe(step, seed) for step in steps]
    results: list[dict[str, float]] = []
    for index, probe in enumerate(probes):
        found = {}
        for name, differences in probe.perturbed_gradients(draws, None if only is None else only[index]):
            squares = sum(_squared_norm(index, difference, probes) for difference in differences)
            # Two draws are twice as far apart as one is from the exact values.
            found[name] = squares / (1 + probe.is_rounded(name)) / draws / step_variance(REFERENCE.bits)
            progress(1)
        results.append(found)
    return results


class _Probe:
    """One step with all its eligible tensors quantized, but for those that have poles."""

    def __init__(self, step: Step, seed: int) -> None:
        self.step = step
        self._seed = seed
        self.replay = Replay(step.backward, step.arguments)
        # The codes stay in memory, the values that they stand for only while backward needs them.
        rounded = (name for name, tensor in step.readings.items() if tensor not in step.with_poles)
        self._given = {name: self._codes(name, 0) for name in rounded}

    def perturbed_gradients(self, draws: int, only: frozenset[str] | None) -> Iterator[tuple[str, list[list[Any]]]]:
        """For every tensor, per draw: what changes in backward's outputs when only this tensor's seed does."""
        names = {name: tensor for name, tensor in self.step.readings.items() if only is None or tensor in only}
        if not names:
            return
        base = self.replay.run(self._given)
        for name, resume in self.replay.forks(self._given, list(names)):
            changed = (resume(self._codes(name, draw)()) for draw in range(1, draws + 1))
            yield names[name], [difference(outputs, base) for outputs in changed]

    def is_rounded(self, tensor: str) -> bool:
        """Whether the tensor is, where it is not perturbed."""
        return tensor not in self.step.with_poles

    def respond(self, tangents: dict[str, torch.Tensor]) -> list[Any]:
        """Backward's outputs for these tangents and zeros for all others."""
        arrived = {name: self.replay.inputs[name] for name in self.step.pair.tangents()}
        zeros = {name: torch.zeros_like(x) for name, x in arrived.items() if isinstance(x, torch.Tensor)}
        changes = {name: change.reshape(zeros[name].shape) for name, change in tangents.items()}
        return self.replay.run({**self._given, **zeros, **changes})

    def _codes(self, name: str, draw: int) -> Callable[[], torch.Tensor]:
        """The values compressed with the seed of ``draw``; the call decompresses them."""
        values = self.replay.evaluate({name})[name]
        code = replace(REFERENCE, seed=tensor_seed(self._seed, f"probe {draw}", name))
        blob = operators.compress(values, *code.to_compress())
        shape, dtype = values.shape, values.dtype
        return lambda: operators.decompress(blob, shape, dtype, *code.to_decompress())


def _squared_norm(index: int, outputs: list[Any], probes: list[_Probe]) -> float:
    """Squared norm of a change of gradients in one step, with what flows on to earlier graphs counted where it ends."""
    changes = GradientChanges([probe.step for probe in probes])
    changes.add(index, outputs)
    while changes.waiting:
        # The latest first: all that flows to a graph has arrived when it runs.
        index = max(changes.waiting)
        changes.add(index, probes[index].respond(changes.waiting.pop(index)))
    return changes.squared_norm()
