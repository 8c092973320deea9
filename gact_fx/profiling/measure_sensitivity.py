"""Measure how much each saved tensor's rounding error moves the gradient (GACT, Algorithm 1).

The slow way, one backward pass a tensor: the oracle of `measure_adjoint`, and what serves tensors that pass through an
operator without a second derivative. The gradient is computed with every eligible tensor quantized; then, tensor by
tensor, again with only that tensor's seed changed. Half the squared distance of the two gradients estimates the
variance that the tensor contributes at this width; divided by ``S(b) = 1 / (2^b - 1)^2`` it is its sensitivity c_l.

The gradient is that of the whole model: what a graph changes in the gradients of its inputs is carried through the
earlier graphs, whose backward passes are linear in their tangents. Only backward is run again, and of the tensor's own
graph only what comes after its first use.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gact_fx.codec import operators
from gact_fx.codec.code import Code, step_variance
from gact_fx.graphs.replay import Replay, Resume
from gact_fx.plan import tensor_seed
from gact_fx.profiling.gradient_changes import GradientChanges, compared, difference
from gact_fx.profiling.rounding_meter import REFERENCE
from gact_fx.profiling.tape import Step

# (code, draw) -> what codes of one tensor change in backward's outputs
Change = Callable[[Code, int], list[Any]]


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
    probes = [
        Probe(step, seed, rounded=[node for node, name in step.readings.items() if name not in step.with_poles])
        for step in steps
    ]
    results: list[dict[str, float]] = []
    for index, probe in enumerate(probes):
        found = {}
        for name, change in probe.changes(None if only is None else only[index]):
            squares = sum(carried(index, change(REFERENCE, draw), probes) for draw in range(1, draws + 1))
            # Two draws are twice as far apart as one is from the exact values.
            is_rounded = name not in probe.step.with_poles
            found[name] = squares / (1 + is_rounded) / draws / step_variance(REFERENCE.bits)
            progress(1)
        results.append(found)
    return results


class Probe:
    """One step's backward pass with the values of the nodes ``rounded`` in codes, and of the nodes ``fixed`` as they
    are recorded whatever changes before them.
    """

    def __init__(self, step: Step, seed: int, rounded: Collection[str] = (), fixed: Collection[str] = ()) -> None:
        self.step = step
        self._seed = seed
        self.replay = Replay(step.backward, step.arguments)
        # The codes stay in memory, the values that they stand for only while backward needs them.
        self._given: dict[str, Any] = {name: self._codes(name, REFERENCE, 0) for name in rounded}
        self._given |= {name: partial(self._recorded, name) for name in fixed}

    def gradients(self) -> list[torch.Tensor]:
        """The recorded ones that no other graph goes on with."""
        return self.step.ends(self.step.outputs or self.replay.run({}))

    def changes(self, only: Collection[str] | None) -> Iterator[tuple[str, Change]]:
        """For every tensor, what codes of it change; to be asked for before the next."""
        names = {name: tensor for name, tensor in self.step.readings.items() if only is None or tensor in only}
        if not names:
            return
        # Gradients of all parameters would take as much memory as these.
        base = {position: compared(self.step, position, x) for position, x in self.replay.outputs(self._given)}
        for name, resume in self.replay.forks(self._given, list(names)):
            yield names[name], partial(self._change, name, resume, base)

    def respond(self, tangents: dict[str, torch.Tensor]) -> list[Any]:
        """Backward's outputs for these tangents and zeros for all others."""
        arrived = {name: self.replay.inputs[name] for name in self.step.pair.tangents()}
        zeros = {name: torch.zeros_like(x) for name, x in arrived.items() if isinstance(x, torch.Tensor)}
        changes = {name: change.reshape(zeros[name].shape) for name, change in tangents.items()}
        return self.replay.run({**self._given, **zeros, **changes})

    def _change(self, name: str, resume: Resume, base: Mapping[int, Any], code: Code, draw: int) -> list[Any]:
        outputs = enumerate(resume(self._codes(name, code, draw)()))
        return [difference(compared(self.step, position, x), base.get(position)) for position, x in outputs]

    def _recorded(self, name: str) -> Any:
        return self.replay.evaluate({name})[name]

    def _codes(self, name: str, code: Code, draw: int) -> Callable[[], torch.Tensor]:
        """The values in codes with the seed of ``draw``; the call decompresses them."""
        values = self._recorded(name)
        code = replace(code, seed=tensor_seed(self._seed, f"probe {draw}", name))
        blob = operators.compress(values, *code.to_compress())
        shape, dtype = values.shape, values.dtype
        return lambda: operators.decompress(blob, shape, dtype, *code.to_decompress())


def carried(index: int, outputs: list[Any], probes: Sequence[Probe]) -> float:
    """Squared norm of a change of gradients in one step, with what flows on to earlier graphs counted where it ends."""
    changes = GradientChanges([probe.step for probe in probes])
    changes.add(index, outputs)
    while changes.waiting:
        # The latest first: all that flows to a graph has arrived when it runs.
        index = max(changes.waiting)
        changes.add(index, probes[index].respond(changes.waiting.pop(index)))
    return changes.squared_norm()
