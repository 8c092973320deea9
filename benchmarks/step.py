"""Step time of gact_fx beside torch.compile: forward, loss and backward, interleaved in one run, medians.

python benchmarks/step.py [--budget-bits 4] [--steps 30] [NETWORK ...]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from machine import describe, save
from networks import build

import gact_fx


def stepper(name: str, budget_bits: float | None) -> Callable[[], None]:
    """A training step (without optimizer) of a fresh network, compiled and warmed up."""
    model, batch, loss_fn = build(name)
    if budget_bits is None:
        model.compile()
    else:
        gact_fx.compile(model, budget_bits=budget_bits, sample_batches=[batch], loss_fn=loss_fn)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss_fn(model, batch).backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    for _ in range(3):
        step()
    return step


def measure(name: str, budget_bits: float, steps: int) -> dict[str, float]:
    """Median seconds per step of both, and the median of the ratios of neighbouring steps."""
    torch._dynamo.reset()
    ways = {"torch.compile": stepper(name, None), "gact_fx": stepper(name, budget_bits)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(steps):
        for way, step in ways.items():
            start = time.perf_counter()
            step()
            seconds[way].append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(seconds["torch.compile"], seconds["gact_fx"], strict=True)]
    return {**{way: statistics.median(values) for way, values in seconds.items()}, "ratio": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["bert", "resnet50", "gpt2", "llama", "swin"])
    parser.add_argument("--budget-bits", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    print(f"median seconds per step at budget_bits={options.budget_bits:g}; {describe()}")
    print(f"{'network':10} {'torch.compile':>14} {'gact_fx':>9} {'ratio':>7}")
    results = {}
    for name in options.networks:
        found = results[name] = measure(name, options.budget_bits, options.steps)
        print(f"{name:10} {found['torch.compile']:14.3f} {found['gact_fx']:9.3f} {found['ratio']:6.2f}x", flush=True)
    save(f"step-{options.budget_bits:g}bits", results)


if __name__ == "__main__":
    main()
