"""Relative error of the gradient of one step, dropout off, against the same compiler without compression, and eager.

    python benchmarks/gradients.py [--budget-bits 8] [--inner inductor] [--device cuda] [NETWORK ...]

"floor" is what the compiler alone changes: fp32 rounding moves ReLU decisions, most of all in a ResNet as initialised.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from machine import describe, save
from networks import build

import gact_fx

Gradients = list[torch.Tensor]


def gradients(
    name: str, budget_bits: float | None, inner: str, compiled: bool = True, device: str = "cpu"
) -> Gradients:
    """Gradients of a fresh network's first step."""
    torch._dynamo.reset()
    model, batch, loss_fn = build(name, dropout=False)
    model, batch = model.to(device), {key: value.to(device) for key, value in batch.items()}
    if compiled:
        # Without a budget nothing is compressed, and so nothing to be profiled.
        samples: dict[str, Any] = {} if budget_bits is None else {"sample_batches": [batch], "loss_fn": loss_fn}
        gact_fx.compile(model, budget_bits=budget_bits, inner=inner, **samples)
    loss_fn(model, batch).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def relative_error(found: Gradients, exact: Gradients) -> float:
    difference = sum(float((a - b).double().square().sum()) for a, b in zip(found, exact, strict=True))
    return float((difference / sum(float(b.double().square().sum()) for b in exact)) ** 0.5)


def measure(name: str, budget_bits: float, inner: str, device: str = "cpu") -> dict[str, float]:
    """Errors of the compressed gradient against eager and the same compiler, and of that compiler against eager."""
    eager = gradients(name, None, inner, compiled=False, device=device)
    exact = gradients(name, None, inner, device=device)
    found = gradients(name, budget_bits, inner, device=device)
    return {
        "against eager": relative_error(found, eager),
        "against the same compiler": relative_error(found, exact),
        "floor": relative_error(exact, eager),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["bert", "gpt2", "resnet50"])
    parser.add_argument("--budget-bits", type=float, default=8.0)
    parser.add_argument("--inner", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    # TF32 would round an eager convolution more than 8 bits do.
    torch.backends.cudnn.allow_tf32 = False
    print(f"relative gradient error at budget_bits={options.budget_bits:g}, inner={options.inner}; {describe()}")
    print(f"{'network':10} {'against eager':>14} {'against the same compiler':>26} {'floor':>8}")
    results = {}
    for name in options.networks:
        found = results[name] = measure(name, options.budget_bits, options.inner, options.device)
        cells = (found["against eager"], found["against the same compiler"], found["floor"])
        print(f"{name:10} {cells[0]:14.2%} {cells[1]:26.2%} {cells[2]:8.2%}", flush=True)
    save(f"gradients-{options.budget_bits:g}bits-{options.inner}", results)


if __name__ == "__main__":
    main()
