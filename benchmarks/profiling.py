"""Cost of profiling in training steps, whatever the number of tensors: BERT with 4, 12 and 24 layers.

    python benchmarks/profiling.py [NETWORK ...]

Profiling is what ``gact_fx.compile(sample_batches=...)`` does beyond tracing: the sample step, run operator by
operator, the adjoint passes, and the allocation of bits. It is timed when everything is traced: the median of three
batches, and the allocation. A training step is one of torch.compile, forward and backward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise

import torch
from machine import describe, save
from networks import Batch, build

import gact_fx


def profile_seconds(name: str) -> tuple[float, int]:
    """Seconds of profiling a batch, tracing excluded, and the number of tensors that were measured."""
    torch._dynamo.reset()
    model, batch, loss_fn = build(name)
    times: list[float] = []

    def batches() -> Iterator[Batch]:
        # BERT sets its problem_type in the first step, and is traced again in the second.
        for _ in range(5):
            yield batch
            times.append(time.perf_counter())

    gact_fx.compile(model, sample_batches=batches(), loss_fn=loss_fn)
    allocation = time.perf_counter() - times[-1]
    seconds = statistics.median(after - before for before, after in pairwise(times[1:])) + allocation
    plan = gact_fx.inspect(model).plan
    assert plan is not None
    return seconds, sum(len(graph.tensors) for graph in plan.graphs)


def step_seconds(name: str, steps: int) -> float:
    """Median seconds of a training step of torch.compile."""
    torch._dynamo.reset()
    model, batch, loss_fn = build(name)
    model.compile()
    seconds: list[float] = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        loss_fn(model, batch).backward()
        seconds.append(time.perf_counter() - start)
    return float(statistics.median(seconds[2:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["bert", "bert12", "bert24"])
    parser.add_argument("--steps", type=int, default=9)
    options = parser.parse_args()
    print(f"seconds of profiling a batch; {describe()}")
    print(f"{'network':10} {'tensors':>8} {'profiling':>10} {'a step':>8} {'steps':>7}")
    results = {}
    for name in options.networks:
        seconds, tensors = profile_seconds(name)
        step = step_seconds(name, options.steps)
        results[name] = {"tensors": tensors, "profiling": seconds, "step": step, "steps": seconds / step}
        print(f"{name:10} {tensors:8} {seconds:8.2f} s {step:6.3f} s {seconds / step:7.1f}", flush=True)
        save("profiling", results)


if __name__ == "__main__":
    main()
