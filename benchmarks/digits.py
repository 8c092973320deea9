"""Test accuracy on scikit-learn's digits with and without compression, over seeds.

    python benchmarks/digits.py [--budget-bits 4] [--seeds 3]

The models and the training are those of ``examples/train_digits.py``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from machine import describe, save

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from train_digits import MODELS, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-bits", type=float, default=4.0)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(f"test accuracy in percent at budget_bits={options.budget_bits:g}, {options.seeds} seeds; {describe()}")
    results: dict[str, dict[str, list[float]]] = {}
    for name in MODELS:
        found: dict[str, list[float]] = {"torch.compile": [], "gact_fx": []}
        for seed in range(options.seeds):
            for way, values in found.items():
                compressed = way == "gact_fx"
                values.append(100 * run(name, compressed, seed=seed, budget_bits=options.budget_bits).value)
        results[name] = found
        for way, values in found.items():
            each = "  ".join(f"{value:.2f}" for value in values)
            print(f"{name:20} {way:14} {each}   mean {statistics.fmean(values):.2f}", flush=True)
    save(f"digits-{options.budget_bits:g}bits", results)


if __name__ == "__main__":
    main()
