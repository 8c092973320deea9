"""What bytes cost: gradient variance and step time over the budget, as a table, JSON and a figure.

    python benchmarks/tradeoff.py [--budgets 8 6 4 3 2] [--steps 10] [--figure tradeoff.png] [NETWORK ...]

Bytes are those that autograd holds, of eager's; variance is the plan's prediction, of the squared gradient; step time
is against that of torch.compile in the same run, interleaved.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from machine import describe, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from memory import held
from networks import Batch, build
from step import stepper

import gact_fx

Points = list[dict[str, float]]


def measure(name: str, budgets: list[float], steps: int) -> Points:
    """One point per budget."""
    torch._dynamo.reset()
    plain = stepper(name, None)
    points = []
    for bits in budgets:
        model, batch, loss_fn = build(name)
        eager = held(model, batch, loss_fn(model, batch))
        model.zero_grad()
        loss = loss_fn(model, batch)
        square = sum(
            float(g.square().sum())
            for g in torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            if g is not None
        )
        gact_fx.compile(model, budget_bits=bits, sample_batches=[batch], loss_fn=loss_fn)
        held_bytes = held(model, batch, loss_fn(model, batch))
        plan = gact_fx.inspect(model).plan
        assert plan is not None and plan.variance is not None

        step = partial(_step, model, batch, loss_fn)
        step()
        ratios = [_seconds(step) / _seconds(plain) for _ in range(steps)]
        point = {"bits": bits, "bytes": held_bytes / eager, "variance": plan.variance / square}
        points.append({**point, "time": statistics.median(ratios)})
    return points


def _step(model: torch.nn.Module, batch: Batch, loss_fn: Callable[..., torch.Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    loss_fn(model, batch).backward()


def _seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def draw(results: dict[str, Points], path: str) -> None:
    """Variance over bytes, and step time over bytes."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, points in results.items():
        shares = [100 * point["bytes"] for point in points]
        left.plot(shares, [point["variance"] for point in points], "o-", label=name)
        right.plot(shares, [point["time"] for point in points], "o-", label=name)
        for point, share in zip(points, shares, strict=True):
            left.annotate(
                f"{point['bits']:g} bits",
                (share, point["variance"]),
                fontsize=7,
                xytext=(4, 4),
                textcoords="offset points",
            )
    _label(left, "variance that compression adds", "of the squared gradient norm")
    left.set_yscale("log")
    left.margins(x=0.1)
    _label(right, "time of a training step", "of torch.compile's")
    right.axhline(1.0, color="grey", linewidth=0.8)
    right.set_ylim(0, 1.1 * max(point["time"] for points in results.values() for point in points))
    figure.savefig(path, dpi=110)


def _label(axes: Axes, title: str, unit: str) -> None:
    axes.set(title=title, xlabel="bytes held for backward, percent of eager", ylabel=unit)
    axes.grid(alpha=0.3)
    axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["bert", "gpt2"])
    parser.add_argument("--budgets", type=float, nargs="*", default=[8, 6, 4, 3, 2])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--figure", default=str(Path(__file__).parent / "results" / "tradeoff.png"))
    options = parser.parse_args()
    print(f"bytes against gradient variance and step time; {describe()}")
    print(f"{'network':10} {'bits':>5} {'bytes':>8} {'variance':>10} {'step time':>10}")
    results = {}
    for name in options.networks:
        results[name] = measure(name, options.budgets, options.steps)
        for p in results[name]:
            print(
                f"{name:10} {p['bits']:5g} {100 * p['bytes']:7.1f}% {p['variance']:10.1e} {p['time']:9.2f}x", flush=True
            )
        save("tradeoff", results)
    draw(results, options.figure)
    print(f"figure: {Path(options.figure).name}")


if __name__ == "__main__":
    main()
