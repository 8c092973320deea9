"""Sensitivities by adjoint passes against GACT's Algorithm 1: rank correlation, median ratio, and what each costs.

    python benchmarks/sensitivity.py [--draws 64] [--probes 2] [NETWORK ...]

"broken" is a small network with a graph break, whose tensors move the gradient of an earlier graph's parameters;
"eager" is the same with operators between the graphs that run in eager PyTorch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from machine import describe, save
from networks import Batch, build
from scipy.stats import spearmanr
from torch import nn

import gact_fx
from gact_fx.config import Config
from gact_fx.profiling.measure_sensitivity import measure_sensitivity
from gact_fx.profiling.measure_step import measure_step
from gact_fx.profiling.tape import Step
from gact_fx.training.check_plan import MeasuredStep
from gact_fx.training.session import Session

Network = tuple[nn.Module, Batch, Callable[[nn.Module, Batch], torch.Tensor]]


class Broken(nn.Module):
    """Two compiled graphs with a graph break between them, or with ``between``, which runs in eager PyTorch."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.between = between
        sizes = ((64, 256), (256, 256), (256, 256), (256, 256), (256, 64))
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)
        self.norms = nn.ModuleList(nn.LayerNorm(size[1]) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.part(x, 0, 3)
        if self.between is not None:
            x = self.between(x)
        else:
            torch._dynamo.graph_break()
        return self.part(x, 3, 5).square().mean()

    def part(self, x: torch.Tensor, start: int, end: int) -> torch.Tensor:
        for layer, norm in zip(self.layers[start:end], self.norms[start:end], strict=True):
            x = nn.functional.gelu(norm(layer(x)))
        return x


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def wave(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(1).sin() * 3


def network(name: str) -> Network:
    if name not in ("broken", "eager"):
        found: Network = build(name)
        return found
    torch.manual_seed(0)
    return Broken(wave if name == "eager" else None), {"x": torch.randn(256, 64)}, lambda model, batch: model(**batch)


def recorded(model: nn.Module, batch: Batch, loss_fn: Callable[[nn.Module, Batch], torch.Tensor]) -> list[Step]:
    """One training step, as profiling records it."""
    torch._dynamo.reset()
    steps: list[Step] = []
    measure_as_usual = Session.measure

    def keep(self: Session, found: Sequence[Step], bar: object = None) -> MeasuredStep | None:
        steps.extend(found)
        return measure_as_usual(self, found, bar)

    Session.measure = keep  # type: ignore[method-assign, assignment]
    try:
        gact_fx.compile(model, sample_batches=[batch], loss_fn=loss_fn)
    finally:
        Session.measure = measure_as_usual  # type: ignore[method-assign]
    return steps


def measure(name: str, draws: int, probes: int) -> dict[str, float]:
    steps = recorded(*network(name))
    with torch.no_grad():
        start = time.perf_counter()
        adjoint = measure_step(steps, Config(profile_draws=probes))
        middle = time.perf_counter()
        empirical = measure_sensitivity(steps, draws=draws)
        end = time.perf_counter()
    pairs = [(a[key].value, e[key]) for a, e in zip(adjoint, empirical, strict=True) for key in e if e[key] > 0]
    left, right = zip(*pairs, strict=True)
    ratios = [a / e for a, e in pairs]
    return {
        "tensors": len(pairs),
        "spearman": float(spearmanr(left, right)[0]),
        "median ratio": statistics.median(ratios),
        "least ratio": min(ratios),
        "largest ratio": max(ratios),
        "adjoint seconds": middle - start,
        "algorithm 1 seconds": end - middle,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["broken", "eager", "bert", "gpt2", "llama", "swin", "resnet50"])
    parser.add_argument("--draws", type=int, default=64, help="perturbed gradients per tensor for Algorithm 1")
    parser.add_argument(
        "--probes", type=int, default=Config.profile_draws, help="random vectors for the adjoint passes"
    )
    options = parser.parse_args()
    print(f"adjoint ({options.probes} probes) against Algorithm 1 ({options.draws} draws); {describe()}")
    columns = ("tensors", "spearman", "median ratio", "least", "largest", "adjoint", "Algorithm 1")
    print(f"{'network':10} " + " ".join(f"{column:>12}" for column in columns))
    results = {}
    for name in options.networks:
        found = results[name] = measure(name, options.draws, options.probes)
        tensors, spearman, *ratios, adjoint, empirical = found.values()
        cells = (f"{tensors:.0f}", f"{spearman:.4f}", *(f"{r:.2f}" for r in ratios))
        cells = (*cells, f"{adjoint:.1f} s", f"{empirical:.1f} s")
        print(f"{name:10} " + " ".join(f"{cell:>12}" for cell in cells), flush=True)
        save("sensitivity", results)


if __name__ == "__main__":
    main()
