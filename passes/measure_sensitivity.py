"""Measure how much each saved tensor's rounding error moves the gradient (GACT, Algorithm 1).

The gradient is computed with every eligible tensor quantized; then, tensor by tensor, again with only that tensor's
seed changed. Half the squared distance of the two gradients estimates the variance that the tensor contributes at this
width, and dividing by ``S(b) = 1 / (2^b - 1)^2`` gives its sensitivity c_l.

The gradient is that of the whole model: what a graph changes in the gradients of its inputs is carried through the
earlier graphs, whose backward passes are linear in their tangents. Only backward is run again, and of the tensor's own
graph only what comes after its first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gact_fx import ops
from gact_fx.plan import slot_seed
from gact_fx.replay import Replay
from gact_fx.tape import Step

PROBE_BITS = 4


def step_variance(bits: int) -> float:
    """S(b) = 1 / (2^b - 1)^2: the variance of b-bit codes relative to the squared range (GACT, equation 4)."""
    levels: int = 2**bits - 1
    return 1.0 / levels**2


def measure_sensitivity(
    steps: Sequence[Step],
    *,
    group_size: int,
    seed: int = 0,
    draws: int = 1,
    rounding: str = "stochastic",
    progress: Callable[[int], None] = lambda count: None,
) -> list[dict[str, float]]:
    """Sensitivity c_l of every tensor to be quantized, per step, in units of squared gradient.

    ``rounding`` is that of training; rounding to nearest has no noise to measure, and is taken for stochastic.
    ``steps`` are the graphs of one training step in forward's order. ``progress`` is called with 1 after each tensor.
    Masks are exact throughout, as they are in training.
    """
    probes = [_Probe(step, group_size, seed, "dither" if rounding == "dither" else "stochastic") for step in steps]
    results: list[dict[str, float]] = []
    for step, probe in zip(steps, probes, strict=True):
        # Tensors that backward never reads add nothing.
        found = dict.fromkeys(probe.orders, 0.0)
        for name, differences in probe.perturbed_gradients(draws):
            squares = sum(_squared_norm(step, difference, probes) for difference in differences)
            found[name] = 0.5 * squares / draws / step_variance(PROBE_BITS)
            progress(1)
        results.append(found)
    return results


class _Probe:
    """One step with all its eligible tensors quantized."""

    def __init__(self, step: Step, group_size: int, seed: int, rounding: str) -> None:
        self.step = step
        self._group_size = group_size
        self._seed = seed
        self._rounding = rounding
        self._replay = Replay(step.pair.backward, step.arguments)
        tensors = step.analysis.quantized()
        self.orders = {tensor.name: how.order for tensor, how in tensors}
        # Name of a tensor → name of the backward node whose value its codes stand for.
        self._reads = {tensor.name: how.instead or tensor.name for tensor, how in tensors}
        masks = {mask for how in step.analysis.eligibility for mask in how.masks}
        # The codes stay in memory, the values that they stand for only while backward needs them.
        rounded = {self._reads[name]: self._codes(name, 0) for name in self.orders}
        self._given = {**self._replay.evaluate(masks), **rounded}

    def perturbed_gradients(self, draws: int) -> Iterator[tuple[str, list[list[Any]]]]:
        """For every tensor, per draw: what changes in backward's outputs when only this tensor's seed does."""
        base = self._replay.run(self._given)
        names = {read: name for name, read in self._reads.items()}
        for read, resume in self._replay.forks(self._given, list(names)):
            name = names[read]
            yield name, [_difference(resume(self._codes(name, draw)()), base) for draw in range(1, draws + 1)]

    def respond(self, tangents: dict[str, torch.Tensor]) -> list[Any]:
        """Backward's outputs for these tangents and zeros for all others."""
        zeros = {
            name: torch.zeros_like(self._replay.inputs[name])
            for name in self.step.pair.tangents()
            if isinstance(self._replay.inputs[name], torch.Tensor)
        }
        return self._replay.run({**self._given, **zeros, **tangents})

    def tangent_shape(self, name: str) -> torch.Size:
        shape: torch.Size = self._replay.inputs[name].shape
        return shape

    def _codes(self, name: str, draw: int) -> Callable[[], torch.Tensor]:
        """The tensor compressed with the seed of ``draw``; the call decompresses it."""
        read, order = self._reads[name], self.orders[name]
        value = self._replay.evaluate({read})[read]
        dense = value.permute(order)
        shape, dtype = dense.shape, value.dtype
        codec = (PROBE_BITS, self._group_size, slot_seed(self._seed, f"probe {draw}", name))
        blob = ops.compress(dense, *codec, None, self._rounding)
        inverse = sorted(range(len(order)), key=lambda d: order[d])
        return lambda: ops.decompress(blob, shape, dtype, *codec, self._rounding).permute(inverse)


def _squared_norm(step: Step, outputs: list[Any], probes: list[_Probe]) -> float:
    """Squared norm of a change of gradients, with what flows on to earlier graphs counted where it ends."""
    total = 0.0
    onward: dict[int, dict[str, torch.Tensor]] = {}
    for position, value in enumerate(outputs):
        if not isinstance(value, torch.Tensor):
            continue
        if position in step.flows:
            earlier, tangent = step.flows[position]
            onward.setdefault(earlier, {})[tangent] = value.reshape(probes[earlier].tangent_shape(tangent))
        else:
            total += float(value.double().square().sum())
    for earlier, tangents in onward.items():
        probe = probes[earlier]
        total += _squared_norm(probe.step, probe.respond(tangents), probes)
    return total


def _difference(left: list[Any], right: list[Any]) -> list[Any]:
    return [
        a - b if isinstance(a, torch.Tensor) and a.dtype.is_floating_point and a is not b else None
        for a, b in zip(left, right, strict=True)
    ]
