"""Graph nets on Cora with and without compression: bytes held for backward, and test accuracy over seeds.

    python benchmarks/cora.py [--budget-bits 4] [--seeds 5] [--inner inductor] [gcn gat sage gin]

The networks and the training are those of ``examples/train_on_cora.py``, graph breaks and all; "eager" trains without
torch.compile. Bytes are counted by ``activation_bytes.py``: parameters, buffers and the graph itself excluded.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from activation_bytes import activation_bytes
from machine import describe, save
from real_data import cora

import gact_fx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from train_on_cora import build, step, train


def held(model: torch.nn.Module, data: Any) -> int:
    """Bytes of one training step between forward and backward."""
    model.train()
    loss = step(model, data)
    size = activation_bytes(loss, exclude=[*model.parameters(), *model.buffers(), *data.to_dict().values()])
    loss.backward()
    model.zero_grad()
    return size


def measure(name: str, data: Any, seed: int, config: gact_fx.Config) -> dict[str, float]:
    """Bytes and accuracy (in percent) of one seed, eager and compressed."""
    torch.compiler.reset()
    exact, model = build(name, data, seed), build(name, data, seed)
    found = {"eager bytes": held(exact, data), "eager accuracy": 100 * train(exact, data)}
    gact_fx.compile(model, config=config)
    accuracy = 100 * train(model, data)
    return {**found, "gact_fx bytes": held(model, data), "gact_fx accuracy": accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["gcn", "gat", "sage", "gin"])
    parser.add_argument("--budget-bits", type=float, default=4.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--inner", choices=["inductor", "eager"], default="inductor")
    options = parser.parse_args()
    config = gact_fx.Config(budget_bits=options.budget_bits, inner=options.inner)
    data = cora()
    print(f"Cora at budget_bits={options.budget_bits:g}, inner={options.inner}, {options.seeds} seeds; {describe()}")
    print(f"{'network':8}{'eager':>10}{'gact_fx':>10}{'ratio':>8}   accuracy, percent: eager, gact_fx, by seed")
    results: dict[str, list[dict[str, float]]] = {}
    for name in options.networks:
        runs = [measure(name, data, seed, config) for seed in range(options.seeds)]
        results[name] = runs
        before, after = runs[0]["eager bytes"], runs[0]["gact_fx bytes"]
        ways = [[run[f"{way} accuracy"] for run in runs] for way in ("eager", "gact_fx")]
        means = ", ".join(f"{statistics.fmean(way):.2f}" for way in ways)
        each = "  ".join(f"{exact:.1f}/{found:.1f}" for exact, found in zip(*ways, strict=True))
        sizes = f"{before / 1e6:>7.2f} MB{after / 1e6:>7.2f} MB{before / after:>7.1f}x"
        print(f"{name:8}{sizes}   {means}   {each}", flush=True)
    save(f"cora-{options.budget_bits:g}bits-{options.inner}", results)


if __name__ == "__main__":
    main()
