"""Predicted against measured error of the gradient, for plans of 8, 4 and 2 bits: does ``plan.variance`` hold?

    python benchmarks/prediction.py [--draws 4] [--inner eager] [--sets networks bent zoo] [NETWORK ...]

Measured by ``gact_fx.measure_gradient_error`` on the sample batch, dropout on: variance and squared bias together, over
draws of the noise. The ratio is measured over predicted: 1 is right, and beyond 2 either way a plan was trusted that
should not have been. What an eager region adds is measured, but not predicted.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import bent_networks
import networks
import torch
from machine import describe, save
from zoo_networks import NAMES as ARCHITECTURES
from zoo_networks import build as build_architecture

import gact_fx

BITS = (8, 4, 2)
NETWORKS = ("bert", "gpt2", "llama", "swin", "resnet50")
Build = Callable[[str], tuple[Any, Any, Any]]
SETS: dict[str, tuple[tuple[str, ...], Build]] = {
    "networks": (NETWORKS, networks.build),
    "bent": (tuple(bent_networks.NAMES), bent_networks.build),
    "zoo": (ARCHITECTURES, build_architecture),
}


@dataclass(frozen=True)
class Result:
    """Squared errors as shares of the squared norm of the gradient."""

    predicted: float
    variance: float
    squared_bias: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return (self.variance + self.squared_bias) / self.predicted if self.predicted > 0 else math.nan


def measure(build: Build, name: str, bits: int, draws: int, inner: str) -> Result:
    """Of a fresh network, profiled on the batch that it is measured on."""
    torch._dynamo.reset()
    model, batch, loss_fn = build(name)
    gact_fx.compile(model, budget_bits=bits, sample_batches=[batch], loss_fn=loss_fn, inner=inner)
    found = gact_fx.measure_gradient_error(model, [batch], loss_fn, draws=draws)
    square = found.total.norm**2
    predicted = (found.predicted_variance or 0.0) / square
    return Result(predicted, found.total.variance / square, found.total.bias_estimate**2 / square)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help="of the sets; all of them where none is named")
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--inner", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--sets", nargs="+", choices=sorted(SETS), default=["networks", "bent"])
    options = parser.parse_args()
    print(f"deviation of the gradient as a share of its norm: predicted, measured, squared ratio; {describe()}")
    print(f"{'network':30} " + " ".join(f"{f'{bits} bits':>26}" for bits in BITS))
    results: dict[str, dict[int, dict[str, float]]] = {}
    outside = count = 0
    for names, build in (SETS[each] for each in options.sets):
        for name in (n for n in names if not options.networks or n in options.networks):
            found = {bits: measure(build, name, bits, options.draws, options.inner) for bits in BITS}
            results[name] = {bits: {**asdict(result), "ratio": result.ratio} for bits, result in found.items()}
            count += len(found)
            outside += sum(not 0.5 <= result.ratio <= 2 for result in found.values())
            print(f"{name:30} " + " ".join(map(_cell, found.values())), flush=True)
            save("prediction", results)
    print(f"{count - outside} of {count} within a factor of 2")


def _cell(result: Result) -> str:
    measured = math.sqrt(result.variance + result.squared_bias)
    return f"{math.sqrt(result.predicted):8.2%} {measured:8.2%} {result.ratio:8.2f}"


if __name__ == "__main__":
    main()
