"""Predicted against measured error of the gradient, for plans of 8, 4 and 2 bits: does ``plan.variance`` hold?

    python benchmarks/prediction.py [--draws 4] [--inner eager] [--sets networks bent zoo] [--sound] [NETWORK ...]

Measured by ``gact_fx.measure_gradient_error`` on the sample batch, dropout on: variance and squared bias together, over
draws of the noise. The ratio is measured over predicted: 1 is right, and beyond 2 either way a plan was trusted that
should not have been. What an eager region adds is measured, but not predicted.

With ``--sound`` a fourth figure: the measured deviation over that of the best plan of the same bytes in which nothing
is stored but what backward is linear in (coefficients, where backward bends in a tensor).
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import patch

import bent_networks
import networks
import numpy as np
import torch
from machine import describe, save
from zoo_networks import NAMES as ARCHITECTURES
from zoo_networks import build as build_architecture

import gact_fx
from gact_fx.planning.allocate_bits import Menu
from gact_fx.planning.list_choices import Item, list_choices

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
    of_sound: float | None = None

    @property
    def error(self) -> float:
        """Deviation and bias together."""
        return math.sqrt(self.variance + self.squared_bias)

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return (self.variance + self.squared_bias) / self.predicted if self.predicted > 0 else math.nan


def sound_choices(items: Sequence[Item], **options: Any) -> list[Menu]:
    """What `list_choices` gives, less codes of values in which backward bends."""
    menus = list_choices(items, **options)
    sound = [
        [c for c in menu if not item.how.bends or c.code is None or c.stored == "coefficients"]
        for item, menu in zip(items, menus, strict=True)
    ]
    return [found or menu for found, menu in zip(sound, menus, strict=True)]


def measure_beside_sound(build: Build, name: str, bits: int, draws: int, inner: str) -> Result:
    """`measure`, and its error over that of the best sound plan of the same bytes."""
    found = measure(build, name, bits, draws, inner)
    with patch("gact_fx.planning.budget.list_choices", sound_choices):
        sound = measure(build, name, bits, draws, inner)
    return replace(found, of_sound=found.error / sound.error if sound.error > 0 else None)


def measure(build: Build, name: str, bits: int, draws: int, inner: str) -> Result:
    """Of a fresh network, profiled on the batch that it is measured on."""
    torch._dynamo.reset()
    model, batch, loss_fn = build(name)

    def seeded(model: Any, batch: Any) -> Any:
        # Some models of transformers draw masks with NumPy.
        np.random.seed(0)
        return loss_fn(model, batch)

    gact_fx.compile(model, budget_bits=bits, sample_batches=[batch], loss_fn=seeded, inner=inner)
    found = gact_fx.measure_gradient_error(model, [batch], seeded, draws=draws)
    square = found.total.norm**2
    predicted = (found.predicted_variance or 0.0) / square
    return Result(predicted, found.total.variance / square, found.total.bias_estimate**2 / square)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help="of the sets; all of them where none is named")
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--inner", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--sets", nargs="+", choices=sorted(SETS), default=["networks", "bent"])
    parser.add_argument("--sound", action="store_true", help="compare with the best sound plan of the same bytes")
    options = parser.parse_args()
    one = measure_beside_sound if options.sound else measure
    of_sound = ", measured over the best sound plan's" if options.sound else ""
    print(f"deviation as a share of the gradient's norm: predicted, measured, squared ratio{of_sound}; {describe()}")
    print(f"{'network':30} " + " ".join(f"{f'{bits} bits':>{33 if options.sound else 26}}" for bits in BITS))
    results: dict[str, dict[int, dict[str, float]]] = {}
    outside = count = 0
    for names, build in (SETS[each] for each in options.sets):
        for name in (n for n in names if not options.networks or n in options.networks):
            found = {bits: one(build, name, bits, options.draws, options.inner) for bits in BITS}
            results[name] = {bits: {**asdict(result), "ratio": result.ratio} for bits, result in found.items()}
            count += len(found)
            outside += sum(not 0.5 <= result.ratio <= 2 for result in found.values())
            print(f"{name:30} " + " ".join(map(_cell, found.values())), flush=True)
            save(f"prediction-{'-'.join(options.sets)}-{options.inner}", results)
    print(f"{count - outside} of {count} within a factor of 2")


def _cell(result: Result) -> str:
    of_sound = "" if result.of_sound is None else f" {result.of_sound:6.2f}"
    return f"{math.sqrt(result.predicted):8.2%} {result.error:8.2%} {result.ratio:8.2f}{of_sound}"


if __name__ == "__main__":
    main()
