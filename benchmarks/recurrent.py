"""Recurrent layers: bytes held for backward, and times, of PyTorch's own in eager mode and under gact_fx.

    python benchmarks/recurrent.py [--budget-bits 4] [--unrolled] [LSTM GRU RNN ...]

A model of two recurrent layers of width 256 between linear ones, 16 sequences of 32, 128 and 512 steps. Times are the
least of some steps (forward and backward), and the first two steps, in which gact_fx profiles, plans and compiles.
The error is that of the whole gradient at 8 bits against eager PyTorch. ``--unrolled`` also has torch.compile trace the
layers step by step (``torch._dynamo.config.allow_rnn``) at 32 steps; that takes minutes.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import torch
from activation_bytes import activation_bytes
from gradients import relative_error
from machine import describe, save
from torch import Tensor, nn

import gact_fx

LENGTHS, ROWS, FEATURES, WIDTH, STEPS = (32, 128, 512), 16, 64, 256, 5
KINDS: dict[str, Any] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
HEAD = ("eager MB", "gact_fx MB", "ratio", "eager s", "gact_fx s", "first two s", "error")


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 10)
        self.rnn = KINDS[kind](WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.last(self.rnn(torch.tanh(self.first(x)))[0]).logsumexp(-1).square().mean()
        return loss


def seconds(model: nn.Module, x: Tensor) -> float:
    """Of one step."""
    model.zero_grad()
    start = time.perf_counter()
    model(x).backward()
    return time.perf_counter() - start


def held(model: nn.Module, x: Tensor) -> int:
    return activation_bytes(model(x), exclude=[*model.parameters(), x])


def gradient(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def measure(kind: str, length: int, budget_bits: float) -> dict[str, float]:
    torch.manual_seed(0)
    torch.compiler.reset()
    eager, x = Recurrent(kind), torch.randn(ROWS, length, FEATURES)
    model, fine = copy.deepcopy(eager), copy.deepcopy(eager)
    gact_fx.compile(model, budget_bits=budget_bits)
    first = seconds(model, x) + seconds(model, x)
    times = [(seconds(eager, x), seconds(model, x)) for _ in range(STEPS)]
    gact_fx.compile(fine, budget_bits=8, inner="eager")
    for _ in range(3):
        seconds(fine, x)
    before, after = held(eager, x), held(model, x)
    return {
        "eager MB": before / 1e6,
        "gact_fx MB": after / 1e6,
        "ratio": before / after,
        "eager s": min(a for a, _ in times),
        "gact_fx s": min(b for _, b in times),
        "first two s": first,
        "error": relative_error(gradient(fine), gradient(eager)),
    }


def unrolled(kind: str) -> dict[str, float]:
    """torch.compile of every step at the shortest length."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, x = Recurrent(kind), torch.randn(ROWS, LENGTHS[0], FEATURES)
    model.compile()
    with torch._dynamo.config.patch(allow_rnn=True):
        return {"first s": seconds(model, x), "s": min(seconds(model, x) for _ in range(STEPS))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--budget-bits", type=float, default=4.0)
    parser.add_argument("--unrolled", action="store_true")
    options = parser.parse_args()
    print(f"two layers of width {WIDTH}, {ROWS} sequences, budget_bits={options.budget_bits:g}; {describe()}")
    print(f"{'layers':10}", *(f"{name:>11}" for name in HEAD))
    results: dict[str, Any] = {}
    for kind in options.kinds:
        for length in LENGTHS:
            found = results[f"{kind} {length}"] = measure(kind, length, options.budget_bits)
            print(f"{kind} {length:<6}", *(f"{found[name]:11.4f}" for name in HEAD), flush=True)
        if options.unrolled:
            step = results[f"{kind} unrolled"] = unrolled(kind)
            print(
                f"{kind}, {LENGTHS[0]} steps, unrolled: first {step['first s']:.0f} s, then {step['s']:.3f} s",
                flush=True,
            )
    save(f"recurrent-{options.budget_bits:g}bits", results)


if __name__ == "__main__":
    main()
