"""Training steps that fill a GPU, in bf16 autocast: bytes held for backward, peak memory and time, of torch.compile and
gact_fx.

    python benchmarks/gpu.py [--budget-bits 4] [--steps 20] [--device cuda|cpu] [--alone] [--verbose] [NETWORK ...]

Networks are those of ``real_networks.py``. On a GPU of 80 GB bert-12 reads 128 x 256 tokens, resnet50 128 images of
224 x 224 and gpt2 64 x 512 tokens; on others the rows go with the memory. "Held" are the storages under the loss
(``activation_bytes.py``); "peak" is ``torch.cuda.max_memory_allocated`` over a step, less what was allocated before it,
of a step by the plan and of the first three steps, in which gact_fx profiles. "To step 3" are the seconds of these.

Networks compile at the same time, in a process each, and their steps are timed one network after the other: steps of
both ways alternate; medians. ``--alone`` has one network wait for the other, for "to step 3" without neighbours. With
``--device cpu`` the networks are small, and only show that the command works.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch
from activation_bytes import activation_bytes
from machine import describe, save
from real_networks import build
from torch import Tensor

import gact_fx

# How many times the rows of real_networks.py on a GPU of 80 GB; other networks take eight times the rows.
TIMES = {"bert-12": 16, "resnet50": 16, "gpt2": 16}
MEMORY = 80e9
WARM_UP = 3
READY, TIMED = "ready", "timed"


@dataclass(frozen=True)
class Cost:
    """What one way of training takes: bytes, bytes (None off CUDA), bytes (None off CUDA), seconds, seconds."""

    held: int
    peak: int | None
    first_peak: int | None
    seconds: float
    first_seconds: float


class Way:
    """One compiled network in training."""

    def __init__(self, name: str, device: str, budget_bits: float | None) -> None:
        self.device = device
        times = TIMES.get(name, 8) * torch.cuda.mem_get_info()[1] / MEMORY if device == "cuda" else 1
        self.model, batch, self.loss_fn = build(name, small=device == "cpu", times=max(1, round(times)))
        self.model.to(device)
        self.batch = {key: value.to(device) for key, value in batch.items()}
        if budget_bits is None:
            self.model.compile()
        else:
            gact_fx.compile(self.model, budget_bits=budget_bits)
        start = time.perf_counter()
        self.first_peak = self.peak(WARM_UP)
        self.first_seconds = time.perf_counter() - start

    def loss(self) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            return self.loss_fn(self.model, self.batch)

    def step(self) -> float:
        """Seconds of forward and backward."""
        self.model.zero_grad(set_to_none=True)
        self._synchronize()
        start = time.perf_counter()
        self.loss().backward()
        self._synchronize()
        return time.perf_counter() - start

    def held(self) -> int:
        """Bytes between forward and backward."""
        known = [*self.model.parameters(), *self.model.buffers(), *self.batch.values()]
        return activation_bytes(self.loss(), exclude=known)

    def peak(self, steps: int = 1) -> int | None:
        """Bytes that are allocated over some steps at most, less those before them."""
        self.model.zero_grad(set_to_none=True)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if self.device == "cuda" else 0
        for _ in range(steps):
            self.step()
        return torch.cuda.max_memory_allocated() - before if self.device == "cuda" else None

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def serve(name: str, options: argparse.Namespace) -> None:
    """In a child: compile both ways, say so, and measure when the parent says so."""
    ways = {"torch.compile": Way(name, options.device, None)}
    ways["gact_fx"] = Way(name, options.device, options.budget_bits)
    memory = {key: (way.held(), way.peak(), way.first_peak) for key, way in ways.items()}
    seconds: dict[str, list[float]] = {key: [way.step()] for key, way in ways.items()}

    def tell(prefix: str) -> None:
        costs = {
            key: Cost(*memory[key], statistics.median(seconds[key]), way.first_seconds) for key, way in ways.items()
        }
        print(prefix, json.dumps({key: asdict(cost) for key, cost in costs.items()}), flush=True)

    gc.collect()
    torch.cuda.empty_cache()
    tell(READY)
    sys.stdin.readline()
    for _ in range(options.steps):
        for key, way in ways.items():
            seconds[key].append(way.step())
    tell(TIMED)


class Child:
    """A process that compiles one network, waits, and times its steps."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, name, "--child", "--device", options.device, "--steps", str(options.steps)]
        command += ["--budget-bits", str(options.budget_bits), *["--verbose"] * options.verbose]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def compiled(self) -> dict[str, Cost] | None:
        """What it has found once it has compiled, its steps timed beside those of others; None if it failed."""
        return self._read(READY)

    def timed(self) -> dict[str, Cost] | None:
        """What it finds while others are silent; None if it failed."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        found = self._read(TIMED)
        self._process.communicate()
        return found

    def _read(self, prefix: str) -> dict[str, Cost] | None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(prefix):
                return {key: Cost(**cost) for key, cost in json.loads(line[len(prefix) :]).items()}
        return None


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(TIMES))
    parser.add_argument("--budget-bits", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--alone", action="store_true", help="one network after the other")
    parser.add_argument("--verbose", action="store_true", help="say what takes the time of the first steps")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # serve one network here
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu.py: there is no GPU; --device cpu runs small networks, to show that the command works")
    if options.verbose:
        logging.basicConfig(format=f"%(asctime)s {options.networks[0]} %(message)s")
        logging.getLogger("gact_fx").setLevel(logging.INFO)
    if options.child:
        serve(options.networks[0], options)
        return 0
    ways = f"torch.compile and gact_fx at {options.budget_bits:g} bits"
    print(f"a training step in bf16 autocast on {options.device}, of {ways}, in MB and seconds; {describe()}")
    widths = {"network": 10, "held": 20, "peak": 20, "first peak": 20, "a step": 20, "to step 3": 20}
    print(" ".join(f"{title:>{width}}" for title, width in widths.items()), flush=True)
    results: dict[str, dict[str, dict[str, float | None]]] = {}
    for together in [[name] for name in options.networks] if options.alone else [options.networks]:
        children = {name: Child(name, options) for name in together}
        for name, child in children.items():
            if costs := child.compiled():
                print(row(name, costs) + "  (steps timed beside other networks')", flush=True)
        for name, child in children.items():
            if costs := child.timed():
                print(row(name, costs), flush=True)
                results[name] = {key: asdict(cost) for key, cost in costs.items()}
                if options.device == "cuda":
                    save(f"step-bf16-{options.budget_bits:g}bits", results)
            else:
                print(f"{name:>10} failed: see above", flush=True)
    return int(len(results) < len(options.networks))


def row(name: str, costs: dict[str, Cost]) -> str:
    plain, ours = costs.values()
    memory = ((plain.held, ours.held), (plain.peak, ours.peak), (plain.first_peak, ours.first_peak))
    cells = [
        *(_pair(a, b, 1e6, ".0f") for a, b in memory),
        _pair(plain.seconds, ours.seconds, 1, ".3f"),
        _pair(plain.first_seconds, ours.first_seconds, 1, ".0f"),
    ]
    return f"{name:>10} " + " ".join(f"{cell:>20}" for cell in cells)


def _pair(plain: float | None, ours: float | None, unit: float, form: str) -> str:
    if plain is None or ours is None:
        return "-"
    return f"{plain / unit:{form}} {ours / unit:{form}} ({ours / plain:.2f})"


if __name__ == "__main__":
    sys.exit(main())
