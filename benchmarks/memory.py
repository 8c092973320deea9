"""Bytes that autograd holds for backward: eager, torch.compile, and gact_fx at a budget.

    python benchmarks/memory.py [--budget-bits 4] [NETWORK ...]

The meter is ``activation_bytes.py`` (unique storages under the loss; parameters, buffers and the batch excluded).
"""

from __future__ import annotations

import argparse

import torch
from activation_bytes import activation_bytes
from machine import describe, save
from networks import Batch, build

import gact_fx

WIDTHS = (10, 14, 10, 9, 11, 10)


def held(model: torch.nn.Module, batch: Batch, loss: torch.Tensor) -> int:
    return activation_bytes(loss, exclude=[*model.parameters(), *model.buffers(), *batch.values()])


def measure(name: str, budget_bits: float) -> dict[str, float]:
    """Bytes of one training step of a fresh network (dropout on) in each way."""
    torch._dynamo.reset()
    model, batch, loss_fn = build(name)
    eager = held(model, batch, loss_fn(model, batch))
    compiled, batch, _ = build(name)
    compiled.compile()
    inductor = held(compiled, batch, loss_fn(compiled, batch))
    gact_fx.compile(model, budget_bits=budget_bits, sample_batches=[batch], loss_fn=loss_fn)
    compressed = held(model, batch, loss_fn(model, batch))
    predicted = gact_fx.inspect(model).bytes_after
    return {"eager": eager, "torch.compile": inductor, "gact_fx": compressed, "predicted": predicted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["bert", "gpt2", "resnet50"])
    parser.add_argument("--budget-bits", type=float, default=4.0)
    options = parser.parse_args()
    print(f"bytes held for backward at budget_bits={options.budget_bits:g}; {describe()}")
    columns = ("eager", "torch.compile", "gact_fx", "of eager", "of compile", "predicted")
    print(f"{'network':10} " + " ".join(f"{name:>{width}}" for name, width in zip(columns, WIDTHS, strict=True)))
    results = {}
    for name in options.networks:
        found = results[name] = measure(name, options.budget_bits)
        sizes = [f"{found[key] / 1e6:.1f} MB" for key in ("eager", "torch.compile", "gact_fx", "predicted")]
        ratios = [f"{found[key] / found['gact_fx']:.2f}x" for key in ("eager", "torch.compile")]
        cells = (*sizes[:3], *ratios, sizes[3])
        print(f"{name:10} " + " ".join(f"{c:>{w}}" for c, w in zip(cells, WIDTHS, strict=True)), flush=True)
    save(f"memory-{options.budget_bits:g}bits", results)


if __name__ == "__main__":
    main()
