"""Wall time until a model of many equal layers trains by a plan: compiled whole, marked, or with one plan for all.

    python benchmarks/equal_layers.py [--layers 32] [--budget-bits 4] [--ways WAY ...]

The layers are ``nn.TransformerEncoderLayer`` of width 256 on 8 x 128 positions, behind a linear layer. The clock runs
from the first call of compile to the end of the first step (forward, loss, backward) in which all layers run by a plan.
"one layer" is a model of one layer, compiled whole. "marked" and "one plan" are what docs/training-loops.md proposes:
the layers are marked by ``torch.compiler.nested_compile_region``, and compiled whole; or one of them is compiled and
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

import torch
import torch._inductor.compile_fx  # so that its import, too, comes before the clock starts
from machine import describe, save
from torch import nn

import gact_fx


class Layer(nn.TransformerEncoderLayer):
    """With a forward of its own: torch.compile leaves a layer of torch.nn that is compiled by itself uncompiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


class Marked(nn.TransformerEncoderLayer):
    """A layer whose code is compiled once for all that equal it."""

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, kind: type[nn.TransformerEncoderLayer], count: int) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256)
        self.layers = nn.ModuleList(kind(256, 4, 1024, batch_first=True) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def train(model: nn.Module, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.randn(8, 128, 256)).backward()


def compiled_whole(model: Model, budget_bits: float) -> None:
    gact_fx.compile(model, budget_bits=budget_bits)
    # The first step is measured.
    train(model, 2)


def with_one_plan(model: Model, budget_bits: float) -> None:
    one, *others = model.layers
    gact_fx.compile(one, budget_bits=budget_bits)
    train(model, 2)
    plan = gact_fx.inspect(one).plan
    for layer in others:
        gact_fx.compile(layer, plan=plan)
    train(model)


def by_torch(model: Model, budget_bits: float) -> None:
    model.compile()
    train(model)


def by_torch_each(model: Model, budget_bits: float) -> None:
    for layer in model.layers:
        layer.compile()
    train(model)


WAYS: dict[str, Callable[[Model, float], None]] = {
    "one layer": compiled_whole,
    "marked": compiled_whole,
    "one plan": with_one_plan,
    "whole": compiled_whole,
    "torch.compile, each layer": by_torch_each,
    "torch.compile, whole": by_torch,
}


def seconds_of(way: str, layers: int, budget_bits: float) -> float:
    """The time that ``way`` takes in this process."""
    kind = Marked if way == "marked" else Layer
    model = Model(kind, 1 if way == "one layer" else layers)
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
