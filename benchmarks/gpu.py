"""Training steps that fill a GPU, in bf16 autocast: bytes held for backward, peak memory and time, of torch.compile and
gact_fx.

    python benchmarks/gpu.py [--budget-bits 4 2] [--steps 20] [--device cuda] [bert-large] [resnet50]

On a GPU of 80 GB, BERT-large reads 32 x 512 tokens and ResNet-50 256 images of 224 x 224; on others the rows go with
the memory. "Held" are the storages under the loss (``activation_bytes.py``); "peak" is
``torch.cuda.max_memory_allocated`` over a step, less what was allocated before it. Steps of both ways alternate;
medians. With ``--device cpu`` the sizes are small, and only show that the command works.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from activation_bytes import activation_bytes
from machine import describe, save
from networks import Batch
from torch import Tensor, nn
from torch.nn import functional as F

import gact_fx

# device: (BERT's layers, width, rows, tokens), (images, pixels a side); of rows and images, those of a GPU of 80 GB
SIZES = {"cuda": ((24, 1024, 32, 512), (256, 224)), "cpu": ((1, 128, 4, 64), (4, 64))}
MEMORY = 80e9
WARM_UP = 3
Loss = Callable[[nn.Module, Batch], Tensor]
Network = tuple[nn.Module, Batch, Loss]


@dataclass(frozen=True)
class Cost:
    """What one way of training takes: bytes, bytes (None off CUDA), seconds."""

    held: int
    peak: int | None
    seconds: float


def rows_of(whole: int, device: str) -> int:
    """Rows for this device's memory where one of 80 GB takes ``whole``."""
    if device != "cuda":
        return whole
    return max(1, int(whole * torch.cuda.mem_get_info()[1] / MEMORY))


def bert_large(layers: int, width: int, rows: int, tokens: int) -> Network:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        attn_implementation="eager",  # type: ignore[call-arg]
    )
    batch = {"input_ids": torch.randint(0, config.vocab_size, (rows, tokens)), "labels": torch.randint(0, 2, (rows,))}
    return BertForSequenceClassification(config), batch, lambda model, batch: model(**batch).loss


def resnet50(rows: int, side: int) -> Network:
    from transformers import ResNetConfig, ResNetForImageClassification

    batch = {"pixel_values": torch.randn(rows, 3, side, side), "labels": torch.randint(0, 1000, (rows,))}
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))  # type: ignore[call-arg]
    return model, batch, lambda model, batch: F.cross_entropy(model(batch["pixel_values"]).logits, batch["labels"])


def build(name: str, device: str) -> Network:
    """The network and its batch on ``device``; its loss is taken under autocast."""
    torch.manual_seed(0)
    (layers, width, texts, tokens), (images, side) = SIZES[device]
    if name == "bert-large":
        model, batch, loss_fn = bert_large(layers, width, rows_of(texts, device), tokens)
    else:
        model, batch, loss_fn = resnet50(rows_of(images, device), side)

    def autocast_loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return loss_fn(model, batch)

    return model.to(device), {key: value.to(device) for key, value in batch.items()}, autocast_loss


class Way:
    """One compiled network in training."""

    def __init__(self, name: str, device: str, budget_bits: float | None) -> None:
        self.device = device
        self.model, self.batch, self.loss_fn = build(name, device)
        if budget_bits is None:
            self.model.compile()
        else:
            gact_fx.compile(self.model, budget_bits=budget_bits, sample_batches=[self.batch], loss_fn=self.loss_fn)
        for _ in range(WARM_UP):
            self.step()

    def step(self) -> float:
        """Seconds of forward and backward."""
        self.model.zero_grad(set_to_none=True)
        self._synchronize()
        start = time.perf_counter()
        self.loss_fn(self.model, self.batch).backward()
        self._synchronize()
        return time.perf_counter() - start

    def held(self) -> int:
        """Bytes between forward and backward."""
        known = [*self.model.parameters(), *self.model.buffers(), *self.batch.values()]
        return activation_bytes(self.loss_fn(self.model, self.batch), exclude=known)

    def peak(self) -> int | None:
        """Bytes that are allocated over a step at most, less those before it."""
        if self.device != "cuda":
            return None
        self.model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        return torch.cuda.max_memory_allocated() - before

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(name: str, device: str, budget_bits: float, steps: int) -> dict[str, Cost]:
    """Costs of both ways of training one network, their steps interleaved."""
    torch._dynamo.reset()
    ways = {"torch.compile": Way(name, device, None), "gact_fx": Way(name, device, budget_bits)}
    memory = {key: (way.held(), way.peak()) for key, way in ways.items()}
    seconds: dict[str, list[float]] = {key: [] for key in ways}
    for _ in range(steps):
        for key, way in ways.items():
            seconds[key].append(way.step())
    return {key: Cost(*memory[key], statistics.median(seconds[key])) for key in ways}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["bert-large", "resnet50"])
    parser.add_argument("--budget-bits", type=float, nargs="+", default=[4.0, 2.0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=list(SIZES), default="cuda")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu.py: there is no GPU; --device cpu runs small sizes, to show that the command works")
    print(f"a training step in bf16 autocast on {options.device}, of torch.compile and gact_fx; {describe()}")
    print(
        f"{'network':10} {'bits':>4} {'held':>24} {'ratio':>6} {'peak':>24} {'ratio':>6} {'seconds':>15} {'ratio':>6}"
    )
    results: dict[str, dict[str, dict[str, dict[str, float | None]]]] = {}
    for name in options.networks:
        for bits in options.budget_bits:
            plain, ours = (found := measure(name, options.device, bits, options.steps)).values()
            peaks = f"{'-':>24} {'-':>6}"
            if plain.peak is not None and ours.peak is not None:
                peaks = f"{_megabytes(plain.peak, ours.peak):>24} {plain.peak / ours.peak:5.1f}x"
            print(
                f"{name:10} {bits:4g} {_megabytes(plain.held, ours.held):>24} {plain.held / ours.held:5.1f}x {peaks} "
                f"{plain.seconds:7.3f} {ours.seconds:7.3f} {ours.seconds / plain.seconds:5.2f}x",
                flush=True,
            )
            results.setdefault(name, {})[f"{bits:g} bits"] = {key: asdict(cost) for key, cost in found.items()}
            if options.device == "cuda":
                save("step-bf16", results)


def _megabytes(plain: int, ours: int) -> str:
    return f"{plain / 1e6:.1f} -> {ours / 1e6:.1f} MB"


if __name__ == "__main__":
    main()
