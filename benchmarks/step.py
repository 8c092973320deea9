"""Step time of gact_fx beside torch.compile: forward, loss and backward, interleaved in one run, medians.

    python benchmarks/step.py [--budget-bits 4] [--steps 30] [--amp] [--where] [NETWORK ...]

Networks are those of ``networks.py``, or else of ``zoo_networks.py``. ``--amp`` is bfloat16 autocast, and ``--where``
says in what kind of call the processor spends the time of a step, by torch.profiler (CPU alone).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from machine import describe, save
from memory import fresh
from torch.profiler import ProfilerActivity, profile

import gact_fx

# Kinds of calls, by how the profiler's names for them begin; what is no such call is Python, autograd and allocation.
KINDS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::mkldnn"),
    "attention": ("aten::_scaled_dot_product", "aten::_flash_attention"),
    "codec": ("gact_fx::",),
    "fused loops": ("## Call CompiledFxGraph",),
}


def stepper(name: str, budget_bits: float | None, *, amp: bool = False) -> Callable[[], None]:
    """A training step (without optimizer) of a fresh network, compiled and warmed up."""
    model, batch, loss_fn = fresh(name, "amp" if amp else "fp32", real=False)
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


def measure(ways: dict[str, Callable[[], None]], steps: int) -> dict[str, float]:
    """Median seconds per step of both, and the median of the ratios of neighbouring steps."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(steps):
        for way, step in ways.items():
            start = time.perf_counter()
            step()
            seconds[way].append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(seconds["torch.compile"], seconds["gact_fx"], strict=True)]
    return {**{way: statistics.median(values) for way, values in seconds.items()}, "ratio": statistics.median(ratios)}


def where(step: Callable[[], None], steps: int) -> dict[str, float]:
    """Milliseconds of a step by kind of call, averaged over ``steps``; of each call without the calls inside it."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step()
    spent = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for event in profiler.key_averages():
        kind = next((kind for kind, names in KINDS.items() if event.key.startswith(names)), "the rest")
        spent[kind] += event.self_cpu_time_total / 1e3 / steps
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["bert", "resnet50", "gpt2", "llama", "swin"])
    parser.add_argument("--budget-bits", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--amp", action="store_true", help="under bfloat16 autocast, on a CPU")
    parser.add_argument("--where", action="store_true", help="milliseconds of a step by kind of call")
    options = parser.parse_args()
    if options.where and torch.cuda.is_available():
        parser.error("--where tells the calls of the CPU apart, and on a GPU these only launch kernels: leave it out")
    precision = "bf16 autocast" if options.amp else "fp32"
    print(f"median seconds per step at budget_bits={options.budget_bits:g}, {precision}; {describe()}")
    print(f"{'network':10} {'torch.compile':>14} {'gact_fx':>9} {'ratio':>7}")
    results = {}
    for name in options.networks:
        torch._dynamo.reset()
        budgets = {"torch.compile": None, "gact_fx": options.budget_bits}
        ways = {way: stepper(name, budget_bits, amp=options.amp) for way, budget_bits in budgets.items()}
        found = results[name] = measure(ways, options.steps)
        print(f"{name:10} {found['torch.compile']:14.3f} {found['gact_fx']:9.3f} {found['ratio']:6.2f}x", flush=True)
        for way, step in ways.items() if options.where else ():
            spent = where(step, steps=5)
            print(f"  ms, {way:14}" + ", ".join(f"{kind} {ms:.1f}" for kind, ms in spent.items()), flush=True)
            found |= {f"{way}, ms in {kind}": ms for kind, ms in spent.items()}
    save(f"step-{options.budget_bits:g}bits{'-bf16' * options.amp}", results)


if __name__ == "__main__":
    main()
