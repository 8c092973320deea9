"""Variance that compression adds to the gradient, at one cut: adaptive bits against the same number for all.

    python benchmarks/variance.py [NETWORK ...] [--adaptive 4 2] [--uniform 4 8] [--draws 8]

Networks are those of ``networks.py``; "minilm", pretrained and fine-tuned for 20 steps (``rate.py``), whose gradient is
that of a batch on which nothing was measured; "cora-gcn" and "cora-gat" of ``examples/train_on_cora.py``.

Measured by ``gact_fx.measure_gradient_error`` on one batch, dropout on: the mean squared distance of compressed
gradients, over draws of the noise, from their mean, as a share of the squared exact gradient. Bias, in the JSON, is the
squared distance of that mean from the exact gradient, without what noise alone makes of it, likewise. Beside the
variance stand the MB that are held.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import rate
import torch
from machine import describe, save, saved

import gact_fx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

DEFAULT = ("bert", "gpt2", "llama", "swin", "resnet50")
MINILM_STEPS = 20


def ways(adaptive: list[float], uniform: list[float]) -> dict[str, dict[str, Any]]:
    """The options of every way, by its name."""
    found: dict[str, dict[str, Any]] = {f"adaptive {bits:g} bits": {"budget_bits": bits} for bits in adaptive}
    same = {"adaptive": False, "rounding": "stochastic", "group_size": 256}
    return {**found, **{f"uniform {bits:g} bits": {"budget_bits": bits, **same} for bits in uniform}}


def network(name: str) -> rate.Network:
    """A fresh model, the batch that is measured and the one whose gradient is looked at, and the loss."""
    if name.startswith("cora-"):
        import train_on_cora
        from real_data import cora

        data = cora()
        return train_on_cora.build(name.removeprefix("cora-"), data), [data], train_on_cora.step
    model, batches, loss_fn = rate.network(name, MINILM_STEPS)
    return model, batches if name.startswith("minilm") else batches[:1], loss_fn


def measure(name: str, settings: dict[str, Any], draws: int) -> dict[str, float]:
    """Relative variance and bias, and the bytes held, of a fresh network with these options."""
    torch._dynamo.reset()
    model, batches, loss_fn = network(name)
    gact_fx.compile(model, sample_batches=batches[:1], loss_fn=loss_fn, **settings)
    total = gact_fx.measure_gradient_error(model, batches[-1:], loss_fn, draws=draws).total
    square = total.norm**2
    held = gact_fx.inspect(model).bytes_after
    return {"variance": total.variance / square, "bias": total.bias_estimate**2 / square, "held": held}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=DEFAULT)
    parser.add_argument("--adaptive", type=float, nargs="*", default=[4, 2], help="budgets")
    parser.add_argument("--uniform", type=float, nargs="*", default=[4, 8], help="widths")
    parser.add_argument("--draws", type=int, default=8)
    options = parser.parse_args()
    columns = ways(options.adaptive, options.uniform)
    print(f"variance added to the gradient, of its squared norm, and MB held; {options.draws} draws; {describe()}")
    print(f"{'network':10} " + " ".join(f"{way:>18}" for way in columns))
    results = saved("variance")
    for name in options.networks:
        print(f"{name:10}", end="", flush=True)
        for way, settings in columns.items():
            found = measure(name, settings, options.draws)
            results.setdefault(name, {})[way] = found
            save("variance", results)
            print(f" {found['variance']:9.2e}, {found['held'] / 1e6:7.3f}", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
