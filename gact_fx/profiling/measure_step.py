"""Sensitivities of one recorded training step: adjoint passes, with Algorithm 1 where those cannot go."""

import logging
import math
from collections.abc import Callable, Sequence

import torch

from gact_fx.codec.operators import has_compiled_kernels
from gact_fx.config import GROUP_SIZES, Config
from gact_fx.graphs.replay import Replay
from gact_fx.profiling.measure_adjoint import Measured, measure_adjoint
from gact_fx.profiling.measure_sensitivity import measure_sensitivity
from gact_fx.profiling.measure_unknown import measure_unknown
from gact_fx.profiling.rounding_meter import RoundingMeter, code_bits
from gact_fx.profiling.stopped_elements import StoppedElements
from gact_fx.profiling.tape import Step
from gact_fx.records import Sensitivity

log = logging.getLogger("gact_fx")
# Of every code of what an unknown operator reads: one element of thousands next to a jump may count for most, and fewer
# draws missed one (an error four times the predicted one).
UNKNOWN_DRAWS = 8


def measure_step(
    steps: Sequence[Step], config: Config, progress: Callable[[int], None] = lambda count: None
) -> list[dict[str, Sensitivity]]:
    """Per graph of the step, the sensitivity of every quantized tensor that backward reads, by name."""
    with torch.no_grad(), torch.random.fork_rng(_cuda_devices(steps)):
        sizes = GROUP_SIZES if config.group_size is None else (config.group_size,)
        if config.sensitivity == "empirical":
            adjoint = [Measured(_equal_meters(step), {}, frozenset(step.readings.values())) for step in steps]
        else:
            adjoint = measure_adjoint(steps, probes=config.profile_draws, seed=config.seed)
        # What is unknown depends on the data, and ranks that run different numbers of backward passes would wait for
        # each other's collectives.
        has_collectives = any(step.has_collectives for step in steps)
        tried = measure_unknown(steps, seed=config.seed, draws=max(config.profile_draws, UNKNOWN_DRAWS))
        unknown = [_unknown(measured) for measured in adjoint]
        slow = [
            (m.opaque if has_collectives else m.opaque | names) - found.keys()
            for m, names, found in zip(adjoint, unknown, tried, strict=True)
        ]
        empirical: list[dict[str, float]] = [{} for _ in steps]
        if any(slow):
            # Several perturbations cost as many backward passes; the adjoint's probes are independent of their number.
            draws = config.profile_draws if config.sensitivity == "empirical" else 1
            empirical = measure_sensitivity(steps, seed=config.seed, draws=draws, only=slow, progress=progress)
        results = []
        results_by_graph = zip(steps, adjoint, unknown, tried, slow, empirical, strict=True)
        for step, measured, unclear, evaluated, opaque, slopes in results_by_graph:
            found = {}
            # Spelled out, every run of a code would be a codec of its own.
            has_runs = config.fuse != "on" and all(map(has_compiled_kernels, _device_types(step)))
            row_numel = {tensor.name: tensor.row_numel if has_runs else None for tensor in step.analysis.saved}
            for name, meter in measured.meters.items():
                if name in evaluated:
                    meter.weigh_equally()
                    found[name] = evaluated[name].result(meter.result(sizes))
                    progress(1)
                    continue
                is_opaque = name in opaque
                if is_opaque:
                    meter.weigh_equally()
                found[name] = meter.result(sizes, slopes.get(name, 0.0) if is_opaque else None, row_numel[name])
                # Algorithm 1 tries 4 bits alone, and says nothing of what other widths would lead to.
                if name in step.with_poles if is_opaque else name in unclear:
                    found[name] = Sensitivity(math.inf, dict.fromkeys(found[name].variances, math.inf))
                if name in measured.bent and not is_opaque:
                    found[name] = measured.bent[name].result(found[name])
                progress(0 if is_opaque else 1)
            results.append(found)
    return results


def _device_types(step: Step) -> set[str]:
    return {value.device.type for value in step.arguments if isinstance(value, torch.Tensor)}


def _unknown(measured: Measured) -> frozenset[str]:
    return frozenset(n for n, meter in measured.meters.items() if meter.is_unknown and n not in measured.bent)


def _equal_meters(step: Step) -> dict[str, RoundingMeter]:
    replay = Replay(step.backward, step.arguments)
    nodes = {node.name: node for node in step.backward.graph.nodes}
    find_stopped = StoppedElements(step)
    meters = {}
    for name, tensor in step.readings.items():
        values = replay.evaluate({name})[name]
        meters[tensor] = RoundingMeter(values, code_bits(nodes[name]), find_stopped(name, values))
    return meters


def _cuda_devices(steps: Sequence[Step]) -> list[int]:
    tensors = [value for step in steps for value in step.arguments if isinstance(value, torch.Tensor)]
    return sorted({t.device.index for t in tensors if t.device.type == "cuda" and t.device.index is not None})
