"""Measure how much each saved tensor's rounding error moves the gradient, for all tensors at once.

The backward graph is a function of what was saved, and autograd can differentiate it. For a random v with independent
entries +-1, ``E_v (v^T J_l)_i^2 = sum_j J_ji^2`` is the squared sensitivity of the whole gradient to element i of
tensor l (Hutchinson's estimator of the diagonal of ``J^T J``), and one reverse pass gives it for every tensor of every
graph. The cost does not grow with the number of tensors. GACT's Algorithm 1 (`measure_sensitivity`) is its oracle.

So that it fits where training does, the graph is differentiated segment by segment (`cut_backward`): what crosses from
one to the next is kept in 8 bits, and what was saved stays compressed but where a segment reads it.

What passes through an operator without a second derivative is left for Algorithm 1: its derivative would be silently
incomplete.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gact_fx.breaks.eager_vjp import EagerVJP
from gact_fx.graphs.aot import GraphPair
from gact_fx.profiling.adjoint import Adjoint, Sources
from gact_fx.profiling.coefficient_meter import Bent
from gact_fx.profiling.probes import Signs
from gact_fx.profiling.rounding_meter import OneError, RoundingMeter
from gact_fx.profiling.tape import Place, Step
from gact_fx.profiling.waiting_slopes import Slopes, Waiting, unpacked


@dataclass(frozen=True)
class Measured:
    """Of one step, by name: the meters of all tensors, what codes of those add in which backward bends, and the
    tensors that need Algorithm 1.
    """

    meters: dict[str, RoundingMeter]
    bent: dict[str, Bent]
    opaque: frozenset[str]


def measure_adjoint(steps: Sequence[Step], *, probes: int, seed: int = 0) -> list[Measured]:
    """Per step, what was measured of every compressed tensor.

    ``steps`` are the graphs of one training step in forward's order; ``probes`` is the number of random v.
    """
    sources = _find_sources(steps)
    signs = Signs(seed)
    opaque: set[Place] = set()
    flowing: dict[Place, Waiting] = {}
    leaves: dict[Any, Slopes] = {}
    done: list[Adjoint] = []
    shared = _same_codes(steps)
    # Gradients flow from late graphs to early ones, and their derivatives back.
    for index, step in enumerate(steps):
        arriving = {position: flowing.get(target, []) for position, target in step.flows.items()}
        for position, detour in step.detours.items():
            arriving[position] = _arriving(detour, flowing, leaves, signs, probes)
        adjoint = Adjoint(step, sources[index], arriving, signs, probes, shared[index])
        flowing.update({(index, name): slopes for name, slopes in adjoint.run().items()})
        done.append(adjoint)
        opaque |= adjoint.opaque
    for error in {error for errors in shared for error in errors.values()}:
        error.finish()
    return [
        Measured(a.meters, a.bent, frozenset(name for at, name in opaque if at == index))
        for index, a in enumerate(done)
    ]


def _same_codes(steps: Sequence[Step]) -> list[dict[str, OneError]]:
    """Per step, by tensor, the error that it has in common with other runs of its graph.

    A graph has one seed for a tensor: what is the same in two runs has the same codes.
    """
    found: list[dict[str, OneError]] = [{} for _ in steps]
    known: dict[tuple[GraphPair, str], list[tuple[torch.Tensor, OneError]]] = {}
    runs = Counter(step.pair for step in steps)
    for step, errors in zip(steps, found, strict=True):
        names = set(step.readings.values()) if runs[step.pair] > 1 else set()
        placeholders = step.backward.graph.find_nodes(op="placeholder")
        for placeholder, blob in zip(placeholders, step.arguments, strict=True):
            if placeholder.name in names:
                others = known.setdefault((step.pair, placeholder.name), [])
                error = next((error for other, error in others if torch.equal(other, blob)), OneError())
                others.append((blob, error))
                errors[placeholder.name] = error
    return found


def _arriving(
    detour: EagerVJP, flowing: Mapping[Place, Waiting], leaves: dict[Any, Slopes], signs: Signs, probes: int
) -> Waiting:
    """Derivatives with respect to a gradient that goes on through eager PyTorch, to tangents and to leaves.

    Of a leaf's gradient, whose parts arrive in several ways, ``leaves`` has the one v for all of them.
    """
    for end in detour.ends:
        if end.is_leaf and end.of not in leaves:
            leaves[end.of] = [signs.like(end.like) for _ in range(probes)]
    ahead = [leaves[end.of] if end.is_leaf else flowing.get(end.of) for end in detour.ends]
    return [
        detour.transpose([unpacked(slopes[probe]) if slopes else None for slopes in ahead]) for probe in range(probes)
    ]


def _find_sources(steps: Sequence[Step]) -> list[Sources]:
    """Per step, the tensors that every node of its backward graph depends on, through all graphs."""
    results: list[Sources] = []
    flowing: dict[Place, frozenset[Place]] = {}
    for index, step in reversed(list(enumerate(steps))):
        given = {name: frozenset({(index, tensor)}) for name, tensor in step.readings.items()}
        given.update({name: found for (at, name), found in flowing.items() if at == index})
        sources: dict[fx.Node, frozenset[Place]] = {}
        for node in step.backward.graph.nodes:
            inputs = frozenset().union(*(sources[i] for i in node.all_input_nodes))
            sources[node] = given.get(node.name, inputs)
        detours = ((p, end.of) for p, detour in step.detours.items() for end in detour.ends if not end.is_leaf)
        for position, target in (*step.flows.items(), *detours):
            returned = step.pair.backward_outputs[position]
            if isinstance(returned, fx.Node):
                flowing[target] = flowing.get(target, frozenset()) | sources[returned]
        results.append(sources)
    return results[::-1]
