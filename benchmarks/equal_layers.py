"""Wall time until a model of many equal layers trains by a plan: compiled whole, and with one plan for all layers.

    python benchmarks/equal_layers.py [--layers 32] [--budget-bits 4] [--ways WAY ...]

The layers are ``nn.TransformerEncoderLayer`` of width 256 on 8 x 128 positions. The clock runs from the first call of
compile to the end of the first step (forward, loss, backward) in which all layers run by a plan. "one layer" is a model
of one layer, compiled whole. "one plan" is what docs/training-loops.md proposes: a layer in the middle is compiled and
trained for two steps, and the others get its plan. Every way is a process of its own with an empty cache folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch._inductor.compile_fx  # so that its import, too, comes before the clock starts
from machine import describe, save
from torch import nn

import gact_fx


def train(model: nn.Module, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.randn(8, 128, 256)).square().mean().backward()


def compiled_whole(layers: nn.Sequential, budget_bits: float) -> None:
    gact_fx.compile(layers, budget_bits=budget_bits)
    # The first step is measured.
    train(layers, 2)


def with_one_plan(layers: nn.Sequential, budget_bits: float) -> None:
    first, middle, *others = layers
    gact_fx.compile(middle, budget_bits=budget_bits)
    train(layers, 2)
    plan = gact_fx.inspect(middle).plan
    for layer in (first, *others):
        gact_fx.compile(layer, plan=plan)
    train(layers)


def by_torch(layers: nn.Sequential, budget_bits: float) -> None:
    layers.compile()
    train(layers)


def by_torch_each(layers: nn.Sequential, budget_bits: float) -> None:
    for layer in layers:
        layer.compile()
    train(layers)


WAYS: dict[str, Callable[[nn.Sequential, float], None]] = {
    "one layer": compiled_whole,
    "one plan": with_one_plan,
    "whole": compiled_whole,
    "torch.compile, each layer": by_torch_each,
    "torch.compile, whole": by_torch,
}


def seconds_of(way: str, layers: int, budget_bits: float) -> float:
    """The time that ``way`` takes in this process."""
    count = 1 if way == "one layer" else layers
    model = nn.Sequential(*(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(count)))
    start = time.perf_counter()
    WAYS[way](model, budget_bits)
    return time.perf_counter() - start


def seconds_elsewhere(way: str, options: argparse.Namespace) -> float:
    """What :func:`seconds_of` finds in a fresh process."""
    command = [sys.executable, __file__, "--child", way, "--layers", str(options.layers)]
    command += ["--budget-bits", str(options.budget_bits)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(child.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--budget-bits", type=float, default=4.0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)  # measure here, print seconds
    options = parser.parse_args()
    if options.child:
        print(seconds_of(options.child, options.layers, options.budget_bits))
        return
    print(f"seconds until {options.layers} layers train by a plan, budget_bits={options.budget_bits:g}; {describe()}")
    results = {}
    for way in options.ways:
        results[way] = seconds_elsewhere(way, options)
        print(f"{way:28} {results[way]:8.1f}", flush=True)
    save(f"equal-layers-{options.layers}", results)


if __name__ == "__main__":
    main()
