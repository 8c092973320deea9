"""Peak of live memory over a training step at real sizes: torch.compile, the planned step, and the step it profiles.

    python benchmarks/peak.py [--budget-bits 4] [--amp] [--ways torch.compile profiled planned] [--small]
                              [--device cpu|cuda] [--times N|fill] [NETWORK ...]

The meter is ``peak_bytes.py``: every allocation counts, transients, gradients and copies included. torch.compile and
gact_fx run in a process each, and gact_fx profiles its first training step, as without ``sample_batches``. "profiled"
is the higher peak of the first two steps: large graphs are recorded in the first one, and measured when the second one
begins. "planned" is the third step, and so is torch.compile's. "Held" is live as backward begins. "Left" is what all
steps up to the second one ("profiled") or the third one have allocated and not freed, beyond gradients. Peaks are also
given above the gradients, which every way of training has. ``--times`` makes the batch larger: "fill" by what a GPU has
room for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import accumulate

import torch
from machine import describe, save, saved
from peak_bytes import peak_bytes
from peers_process import Case, Surroundings, parse_times, times_that_fill
from real_networks import NAMES, build

import gact_fx

WAYS = ("torch.compile", "profiled", "planned")


def measure(way: str, network: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By way, the bytes of one step of a fresh network in this process, by what they are."""
    device = options.device
    model, batch, loss_fn = build(network, small=options.small, times=int(options.times))
    model, batch = model.to(device), {key: value.to(device) for key, value in batch.items()}
    if way == "torch.compile":
        model.compile()
    else:
        gact_fx.compile(model, budget_bits=options.budget_bits)

    def loss() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=options.amp):
            return loss_fn(model, batch)

    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    # The first step compiles or profiles, and the second one compiles what was planned.
    peaks, seconds = [], []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        peaks.append(peak_bytes(loss, device))
        seconds.append(time.perf_counter() - start)
    first, second, planned = peaks
    highest = max(first, second, key=lambda peak: peak.step)
    left = list(accumulate(peak.left - gradients for peak in peaks))
    found = {"profiled": (highest, left[1], sum(seconds[:2])), "planned": (planned, left[2], seconds[2])}
    if way == "torch.compile":
        found = {way: found["planned"]}
    return {
        name: {
            "gradients": gradients, "peak": peak.step, "held": peak.held, "left": remains, "seconds": taken,
        }
        for name, (peak, remains, taken) in found.items()
    }  # fmt: skip


def measure_elsewhere(way: str, network: str, times: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """What :func:`measure` finds in a fresh process."""
    numbers = ["--budget-bits", str(options.budget_bits), "--times", str(times), "--device", options.device]
    switches = [*["--amp"] * options.amp, *["--small"] * options.small]
    command = [sys.executable, __file__, network, "--child", way, *numbers, *switches]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(child.stdout.splitlines()[-1])
    return found


def times_of(network: str, options: argparse.Namespace) -> int:
    """How many times the rows; "fill" asks a process that trains the network in eager PyTorch."""
    if options.times != "fill":
        return int(options.times)
    with tempfile.TemporaryDirectory() as folder:
        case = Case(network, "eager", options.amp, options.small, device=options.device)
        return times_that_fill(case, Surroundings(folder, sys.stderr, limit_s=300))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NAMES))
    parser.add_argument("--budget-bits", type=float, default=4.0)
    parser.add_argument("--amp", action="store_true", help="under bfloat16 autocast")
    parser.add_argument("--small", action="store_true", help="small networks, for a quick run")
    parser.add_argument(
        "--times", type=parse_times, default="1", help='a batch of so many times the rows; "fill" fills a GPU'
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)  # measure here, print JSON
    options = parser.parse_intermixed_args()
    if options.times == "fill" and options.device != "cuda":
        parser.error("--times fill fills a GPU; on the CPU give a number")
    return options


def main() -> None:
    options = parse_options()
    if options.child:
        print(json.dumps(measure(options.child, options.networks[0], options)))
        return
    precision = "bf16 autocast" if options.amp else "fp32"
    print(f"MB over one step at budget_bits={options.budget_bits:g}, {precision}; {describe()}")
    columns = ("gradients", "peak", "above", "held", "left", "above / torch.compile's")
    print(f"{'network':10} {'way':14} " + " ".join(f"{name:>9}" for name in columns))
    suffix = f"{'bf16' if options.amp else 'fp32'}{'-small' * options.small}"
    # Of other networks there is what was measured before.
    results: dict[str, dict[str, dict[str, float]]] = saved(f"peak-{options.budget_bits:g}bits-{suffix}")
    for name in options.networks:
        results[name] = {}
        times = times_of(name, options)
        measured: dict[str, dict[str, float]] = {}
        for way in options.ways:
            if way not in measured:
                measured |= measure_elsewhere(way, name, times, options)
            found = results[name][way] = {**measured[way], "times": times}
            above = found["peak"] - found["gradients"]
            sizes = (found["gradients"], found["peak"], above, found["held"], found["left"])
            plain = results[name].get("torch.compile")
            share = f" 1/{(plain['peak'] - plain['gradients']) / max(above, 1):.2f}" if plain else ""
            print(f"{name:10} {way:14} " + " ".join(f"{size / 1e6:9.1f}" for size in sizes) + share, flush=True)
            save(f"peak-{options.budget_bits:g}bits-{suffix}", results)


if __name__ == "__main__":
    main()
