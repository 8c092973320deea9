"""Recompilations over training steps whose batches vary in size.

    python benchmarks/recompiles.py [--steps 50] [--inner inductor]

A CNN with batch norm (rows vary) and a transformer (rows and length vary), each profiled on a sample batch or on the
first training step. Warm-up is five steps of different sizes, since torch.compile itself compiles apart a size of 1
(Dynamo), batches of fewer than 16 rows (PyTorch's rule for choosing a convolution), and this CNN's batches of 16 rows
(Inductor's C++, where a sum has more terms than a limit). Then batch sizes are drawn from 1 to 32 (lengths from 2 to
64). Counted are the graphs that Dynamo hands to the backends. "worst" is the largest relative error of a step's
gradient, at 8 bits, against eager.
"""

from __future__ import annotations

import argparse
import logging
import random
from collections.abc import Callable
from typing import Any

import torch
from machine import describe, save
from torch import Tensor, nn
from torch.nn import functional as F

import gact_fx

WARM_UP = ((8, 16), (20, 24), (5, 12), (1, 9), (16, 40))
Batch = tuple[Tensor, Tensor]


class Cnn(nn.Module):
    """Two convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(16), nn.BatchNorm2d(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.first(x)))
        x = torch.relu(self.norm2(self.second(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), y)

    def batch(self, rows: int, length: int) -> Batch:
        return torch.randn(rows, 3, 16, 16), torch.randint(0, 10, (rows,))


class Transformer(nn.Module):
    """Two encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 64), nn.Embedding(64, 64)
        layers = [nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(64, 50)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())

    def batch(self, rows: int, length: int) -> Batch:
        return torch.randint(0, 50, (rows, length)), torch.randint(0, 50, (rows, length))


def graphs_compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def measure(make: Callable[[], Any], sampled: bool, steps: int, inner: str) -> dict[str, float]:
    """Graphs compiled by the end of warm-up and after it, and the worst error of a gradient."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model, exact = make(), make()
    exact.load_state_dict(model.state_dict())
    samples: dict[str, Any] = {"sample_batches": [model.batch(8, 16)]} if sampled else {}
    gact_fx.compile(model, budget_bits=8, inner=inner, **samples)
    draw = random.Random(0)
    sizes = [*WARM_UP, *((draw.randint(1, 32), draw.randint(2, 64)) for _ in range(steps))]
    errors, counts = [], []
    for rows, length in sizes:
        batch = model.batch(rows, length)
        found, wanted = (torch.autograd.grad(m(*batch), list(m.parameters())) for m in (model, exact))
        pairs = list(zip(found, wanted, strict=True))
        squares = sum(float((a - b).square().sum()) for a, b in pairs)
        errors.append((squares / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5)
        counts.append(graphs_compiled())
    warm = counts[len(WARM_UP) - 1]
    return {"warm-up": warm, "after": counts[-1] - warm, "worst": max(errors)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--inner", default="inductor")
    options = parser.parse_args()
    # Where the graph of varying sizes is another than the one profiled, the log says so; here the error does.
    logging.getLogger("gact_fx").setLevel(logging.ERROR)
    print(f"graphs compiled, {options.steps} steps after warm-up, inner={options.inner}; {describe()}")
    print(f"{'network':12} {'profiled on':14} {'warm-up':>8} {'after':>6} {'worst':>9}")
    results = {}
    for make in (Cnn, Transformer):
        for sampled in (True, False):
            where = "sample batch" if sampled else "first step"
            found = results[f"{make.__name__.lower()}, {where}"] = measure(make, sampled, options.steps, options.inner)
            print(
                f"{make.__name__.lower():12} {where:14} {found['warm-up']:8} {found['after']:6} {found['worst']:9.2%}",
                flush=True,
            )
    save(f"recompiles-{options.inner}", results)


if __name__ == "__main__":
    main()
