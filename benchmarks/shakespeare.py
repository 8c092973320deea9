"""Validation loss of a small character-level GPT on a million characters of Shakespeare: torch.compile, gact_fx.

    python benchmarks/shakespeare.py [--budget-bits 4 2] [--seeds 3] [--steps 500] [--profile-every 50]

The first 90 % of the text are trained on, the last 10 % are the validation. All runs of a seed have the same initial
weights, the same batches and the same seed for dropout (0.1). AdamW, warm-up and a cosine down to zero. The loss is the
mean over all whole windows of the validation text that do not overlap, in nats a character, without dropout and in
eager mode, so that it is the same code for all.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from machine import describe, save
from real_data import tinyshakespeare
from torch import Tensor, nn
from torch.nn import functional as F

import gact_fx

BATCH, CONTEXT, WIDTH, HEADS, LAYERS = 16, 128, 128, 4, 4
DROPOUT = 0.1
STEPS, WARM_UP = 500, 50
PROFILE_EVERY = 50
MAX_RATE = 3e-3
Batch = tuple[Tensor, Tensor]


class Layer(nn.Module):
    """Causal attention and a two-layer perceptron, each behind a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        x = x + self.dropout(self.out(self.attend(self.norm1(x), future)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))  # type: ignore[no-any-return]

    def attend(self, x: Tensor, future: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).masked_fill(future, float("-inf"))
        return (self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).reshape(rows, length, WIDTH)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Characters in, logits of the next character out."""

    future: Tensor

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)
        self.dropout = nn.Dropout(DROPOUT)
        self.register_buffer("future", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.06)
        for name, weight in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):  # ends of residual branches, smaller the more there are
                nn.init.normal_(weight, std=0.06 / math.sqrt(2 * LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.tokens(tokens) + self.places.weight)
        for layer in self.layers:
            x = layer(x, self.future)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def encode(text: str) -> tuple[Tensor, Tensor, int]:
    """Train and validation text as numbers, and how many different characters there are."""
    characters = {character: number for number, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([characters[character] for character in text])
    train, validation = numbers.split([len(text) * 9 // 10, len(text) - len(text) * 9 // 10])
    return train, validation, len(characters)


def draw(text: Tensor, generator: torch.Generator) -> Batch:
    """Random windows of ``text``, and the same windows one character on."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, 1:]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def train(budget_bits: float | None, seed: int, steps: int, text: str, profile_every: int) -> float:
    """Validation loss of a newly trained network. ``budget_bits`` None: torch.compile."""
    torch.compiler.reset()
    torch.manual_seed(seed)
    training, validation, characters = encode(text)
    model = GPT(characters)
    generator = torch.Generator().manual_seed(seed)
    if budget_bits is None:
        model.compile()
    else:
        other = torch.Generator().manual_seed(seed + 1)
        sample = [draw(training, other)]
        every = profile_every or None
        gact_fx.compile(model, budget_bits=budget_bits, profile_every=every, sample_batches=sample, loss_fn=loss_fn)
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=MAX_RATE, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    for _ in range(steps):
        loss = loss_fn(model, draw(training, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return validate(model, validation)


def rate(step: int, steps: int) -> float:
    """Share of the highest learning rate: a line up, and half a cosine down to zero."""
    return min((step + 1) / WARM_UP, (1 + math.cos(math.pi * step / steps)) / 2)


def validate(model: nn.Module, text: Tensor) -> float:
    model.eval()
    windows = text[: (len(text) - 1) // CONTEXT * CONTEXT + 1]
    inputs, targets = windows[:-1].view(-1, CONTEXT), windows[1:].view(-1, CONTEXT)
    with torch.no_grad():  # forward() itself is not compiled
        parts = [
            F.cross_entropy(model.forward(x).mT, y, reduction="sum")
            for x, y in zip(inputs.split(64), targets.split(64), strict=True)
        ]
    return sum(part.item() for part in parts) / targets.numel()


def way_name(budget_bits: float | None) -> str:
    return "torch.compile" if budget_bits is None else f"gact_fx, {budget_bits:g} bits"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-bits", type=float, nargs="+", default=[4.0, 2.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--profile-every", type=int, default=PROFILE_EVERY, help="steps; 0: plan once, before the first"
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    text = tinyshakespeare()
    ways: list[float | None] = [None, *options.budget_bits]
    print(f"validation loss in nats a character on Shakespeare, {options.steps} steps; {describe()}")
    losses: dict[str, list[float]] = {way_name(way): [] for way in ways}
    for seed in range(options.seeds):
        for way in ways:
            start = time.perf_counter()
            losses[way_name(way)].append(train(way, seed, options.steps, text, options.profile_every))
            seconds = time.perf_counter() - start
            print(f"seed {seed}  {way_name(way):16} {losses[way_name(way)][-1]:.4f}   {seconds:.0f} s", flush=True)
    save("shakespeare" if options.profile_every else "shakespeare-one-plan", report(losses))


def report(losses: dict[str, list[float]]) -> dict[str, dict[str, float | list[float]]]:
    """Print the table; the same figures by way."""
    each_width = 8 * len(losses["torch.compile"])
    print(f"\n{'way':16} {'each seed':{each_width}} {'mean':>8}   of torch.compile's: more, by seed")
    plain = losses["torch.compile"]
    results: dict[str, dict[str, float | list[float]]] = {}
    for way, found in losses.items():
        mean = sum(found) / len(found)
        more = mean / (sum(plain) / len(plain)) - 1
        results[way] = {"each": found, "mean": mean, "more": more}
        cells = "".join(f"{value:8.4f}" for value in found)
        by_seed = " ".join(f"{a / b - 1:+.2%}" for a, b in zip(found, plain, strict=True))
        against = "" if way == "torch.compile" else f"   {more:+.2%} ({by_seed})"
        print(f"{way:16} {cells:{each_width}} {mean:8.4f}{against}")
    return results


if __name__ == "__main__":
    main()
