"""Peak of live memory over a training step at real sizes: torch.compile, the planned step, and the step it profiles.

    python benchmarks/peak.py [--budget-bits 4] [--amp] [--ways torch.compile profiled planned] [NETWORK ...]

The meter is ``peak_bytes.py``: every allocation counts, transients, gradients and copies included. Each way runs in a
process of its own, and profiles its first training step, as a user without ``sample_batches`` would. "profiled" is the
higher peak of the first two steps: large graphs are recorded in the first one, and measured when the second one begins.
"Held" is live as backward begins, "left" after the second step beyond gradients. Peaks are also given above the
gradients, which every way of training has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
from machine import describe, save
from peak_bytes import peak_bytes
from real_networks import NAMES, build

import gact_fx

WAYS = ("torch.compile", "profiled", "planned")


def measure(way: str, network: str, bits: float, amp: bool) -> dict[str, float]:
    """Bytes of one step of a fresh network in this process, by what they are."""
    model, batch, loss_fn = build(network)
    if way == "torch.compile":
        model.compile()
    else:
        gact_fx.compile(model, budget_bits=bits)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if amp else contextlib.nullcontext():
            return loss_fn(model, batch)

    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    start = time.perf_counter()
    if way == "profiled":
        first = peak_bytes(loss)
        model.zero_grad(set_to_none=True)
        second = peak_bytes(loss)
        found, left = max(first, second, key=lambda peak: peak.step), second.left
    else:
        # The first step compiles or profiles, and the second one compiles what was planned.
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            loss().backward()
        start = time.perf_counter()
        model.zero_grad(set_to_none=True)
        found = peak_bytes(loss)
        left = found.left
    return {
        "gradients": gradients, "peak": found.step, "held": found.held, "left": left - gradients,
        "seconds": time.perf_counter() - start,
    }  # fmt: skip


def measure_elsewhere(way: str, network: str, bits: float, amp: bool) -> dict[str, float]:
    """What :func:`measure` finds in a fresh process."""
    command = [sys.executable, __file__, network, "--child", way, "--budget-bits", str(bits), *["--amp"] * amp]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NAMES))
    parser.add_argument("--budget-bits", type=float, default=4.0)
    parser.add_argument("--amp", action="store_true", help="under bfloat16 autocast")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)  # measure here, print JSON
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options.networks[0], options.budget_bits, options.amp)))
        return
    precision = "bf16 autocast" if options.amp else "fp32"
    print(f"MB over one step at budget_bits={options.budget_bits:g}, {precision}; {describe()}")
    columns = ("gradients", "peak", "above", "held", "left", "above / torch.compile's")
    print(f"{'network':10} {'way':14} " + " ".join(f"{name:>9}" for name in columns))
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in options.networks:
        results[name] = {}
        for way in options.ways:
            found = results[name][way] = measure_elsewhere(way, name, options.budget_bits, options.amp)
            above = found["peak"] - found["gradients"]
            sizes = (found["gradients"], found["peak"], above, found["held"], found["left"])
            plain = results[name].get("torch.compile")
            share = f" 1/{(plain['peak'] - plain['gradients']) / max(above, 1):.2f}" if plain else ""
            print(f"{name:10} {way:14} " + " ".join(f"{size / 1e6:9.1f}" for size in sizes) + share, flush=True)
            save(f"peak-{options.budget_bits:g}bits-{'bf16' if options.amp else 'fp32'}", results)


if __name__ == "__main__":
    main()
