"""Bytes that autograd holds for backward: eager, torch.compile, and gact_fx at a budget.

    python benchmarks/memory.py [--budget-bits 4 2] [--amp | --bf16] [--real] [NETWORK ...]

With ``--amp`` all three run under bfloat16 autocast, with ``--bf16`` weights are bfloat16. Networks are those of
``networks.py``, or else of ``zoo_networks.py``; with ``--real``, those of ``real_networks.py``. The meter is
``activation_bytes.py`` (unique storages under the loss; parameters, buffers and the batch excluded).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from activation_bytes import activation_bytes
from machine import describe, save
from networks import Batch, Network, build
from real_networks import build as build_real
from zoo_networks import build as build_architecture

import gact_fx

SMALL = ("bert", "resnet50", "gpt2", "llama", "swin", "gcn", "gat")
WIDTHS = (5, 10, 14, 10, 9, 11, 10)


def held(model: torch.nn.Module, batch: Batch, loss: torch.Tensor) -> int:
    return activation_bytes(loss, exclude=[*model.parameters(), *model.buffers(), *batch.values()])


def fresh(name: str, precision: str, real: bool) -> Network:
    """The network, its dropout on, and its loss under autocast where ``precision`` is "amp"."""
    makers = {True: build_real, False: build if name.startswith(SMALL) else build_architecture}
    model, batch, loss_fn = makers[real](name)

    def autocast_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp"):
            return loss_fn(model, batch)

    return model.bfloat16() if precision == "bf16" else model, batch, autocast_loss


def without(name: str, precision: str = "fp32", real: bool = False, *, compiled: bool) -> int:
    """Bytes of one training step of a fresh network without gact_fx, ``compiled`` by torch.compile or not."""
    torch._dynamo.reset()
    model, batch, loss_fn = fresh(name, precision, real)
    if compiled:
        model.compile()
    return held(model, batch, loss_fn(model, batch))


def at(budget_bits: float, name: str, precision: str = "fp32", real: bool = False) -> tuple[int, int]:
    """Bytes of one planned step of a fresh network, measured and predicted."""
    torch._dynamo.reset()
    model, batch, loss_fn = fresh(name, precision, real)
    gact_fx.compile(model, budget_bits=budget_bits, sample_batches=[batch], loss_fn=loss_fn)
    return held(model, batch, loss_fn(model, batch)), gact_fx.inspect(model).bytes_after


def measure(name: str, budgets: list[float], precision: str = "fp32", real: bool = False) -> Iterator[dict[str, float]]:
    """Bytes of one training step of a fresh network in each way, budget by budget."""
    eager, inductor = (without(name, precision, real, compiled=compiled) for compiled in (False, True))
    for budget_bits in budgets:
        found, predicted = at(budget_bits, name, precision, real)
        yield {"eager": eager, "torch.compile": inductor, "gact_fx": found, "predicted": predicted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["bert", "resnet50", "gpt2", "llama", "swin"])
    parser.add_argument("--budget-bits", type=float, nargs="+", default=[4.0, 2.0])
    parser.add_argument("--amp", action="store_true", help="under bfloat16 autocast")
    parser.add_argument("--bf16", action="store_true", help="weights in bfloat16")
    parser.add_argument("--real", action="store_true", help="at the sizes that people train")
    options = parser.parse_args()
    precision = "amp" if options.amp else "bf16" if options.bf16 else "fp32"
    suffix = "-real" * options.real + {"fp32": "", "amp": "-bf16", "bf16": "-bf16-weights"}[precision]
    print(f"bytes held for backward, {precision}; {describe()}")
    columns = ("bits", "eager", "torch.compile", "gact_fx", "of eager", "of compile", "predicted")
    print(f"{'network':10} " + " ".join(f"{name:>{width}}" for name, width in zip(columns, WIDTHS, strict=True)))
    results: dict[float, dict[str, dict[str, float]]] = {bits: {} for bits in options.budget_bits}
    for name in options.networks:
        for bits, found in zip(
            options.budget_bits, measure(name, options.budget_bits, precision, options.real), strict=True
        ):
            results[bits][name] = found
            sizes = [f"{found[key] / 1e6:.2f} MB" for key in ("eager", "torch.compile", "gact_fx", "predicted")]
            ratios = [f"{found[key] / found['gact_fx']:.2f}x" for key in ("eager", "torch.compile")]
            cells = (f"{bits:g}", *sizes[:3], *ratios, sizes[3])
            print(f"{name:10} " + " ".join(f"{c:>{w}}" for c, w in zip(cells, WIDTHS, strict=True)), flush=True)
            save(f"memory-{bits:g}bits{suffix}", results[bits])


if __name__ == "__main__":
    main()
