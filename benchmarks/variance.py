"""Variance that compression adds to the gradient, at one cut: adaptive bits against the same number for all.

    python benchmarks/variance.py [--draws 8] [NETWORK ...]

Measured by ``gact_fx.measure_gradient_error`` on one batch, dropout on: the mean squared distance of compressed
gradients, over draws of the noise, from their mean, as a share of the squared exact gradient. Bias, in the JSON, is the
squared distance of that mean from the exact gradient, without what noise alone makes of it, likewise.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from machine import describe, save
from networks import build

import gact_fx

WAYS: dict[str, dict[str, Any]] = {
    "adaptive 4 bits": {"budget_bits": 4},
    "uniform 4 bits": {"budget_bits": 4, "adaptive": False, "rounding": "stochastic", "group_size": 256},
    "uniform 8 bits": {"budget_bits": 8, "adaptive": False, "rounding": "stochastic", "group_size": 256},
    "adaptive 2 bits": {"budget_bits": 2},
}


def measure(name: str, draws: int) -> dict[str, dict[str, float]]:
    """Relative variance and bias of every way on a fresh network."""
    results = {}
    for way, settings in WAYS.items():
        torch._dynamo.reset()
        model, batch, loss_fn = build(name)
        gact_fx.compile(model, sample_batches=[batch], loss_fn=loss_fn, **settings)
        total = gact_fx.measure_gradient_error(model, [batch], loss_fn, draws=draws).total
        square = total.norm**2
        results[way] = {"variance": total.variance / square, "bias": total.bias_estimate**2 / square}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["bert", "gpt2", "llama", "swin", "resnet50"])
    parser.add_argument("--draws", type=int, default=8)
    options = parser.parse_args()
    print(f"variance added to the gradient, of its squared norm, {options.draws} draws; {describe()}")
    print(f"{'network':10} " + " ".join(f"{way:>16}" for way in WAYS) + f" {'of uniform 4':>14} {'of uniform 8':>14}")
    results = {}
    for name in options.networks:
        found = results[name] = measure(name, options.draws)
        values = [found[way]["variance"] for way in WAYS]
        ratios = [values[0] / values[1], values[0] / values[2]]
        cells = [f"{v:16.2e}" for v in values] + [f"{r:13.3f}x" for r in ratios]
        print(f"{name:10} " + " ".join(cells), flush=True)
        save("variance", results)


if __name__ == "__main__":
    main()
