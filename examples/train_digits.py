"""Train two small image models on handwritten digits, with exact and with compressed activations.

A residual CNN with batch norm and a vision transformer learn scikit-learn's 8x8 digits (no download), once in plain
``torch.compile`` and once in ``gact_fx.compile``, from the same weights and on the same batches in the same order. The
table says what that did to test accuracy, to the bytes held between forward and backward and to the time of a step;
the figure shows the loss curves and the bits that were chosen for every tensor.

    python examples/train_digits.py                     # one to two minutes on two cores; writes digits.png
    python examples/train_digits.py --budget-bits 2 --epochs 10 --output two_bits.png
    python examples/train_digits.py --inner eager       # needs no C++ compiler
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
from comparison import RunResult, draw, held_bytes, run_name, table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

import gact_fx

BATCH = 64
EPOCHS = 60


class Block(nn.Module):
    """Two 3x3 convolutions with batch norm around a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        same = stride == 1 and channels_in == channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResidualCNN(nn.Module):
    """Three residual blocks, 8x8 down to 4x4."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(1, 32, 1), Block(32, 32, 1), Block(32, 64, 2))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean((2, 3)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A transformer layer: attention and a two-layer perceptron, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Sixteen patches of 2x2 pixels, four transformer layers, the mean over the patches."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.positions = nn.Parameter(0.5 * torch.randn(16, width))
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.layers(tokens)).mean(1))  # type: ignore[no-any-return]


MODELS: dict[str, type[nn.Module]] = {"residual CNN": ResidualCNN, "vision transformer": VisionTransformer}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train images, test images, train labels, test labels: two stratified halves, always the same."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.5, stratify=labels, random_state=0)
    x_train, x_test = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1 for part in parts[:2])
    y_train, y_test = (torch.tensor(part, dtype=torch.int64) for part in parts[2:])
    return x_train, x_test, y_train, y_test


def batches(x: Tensor, y: Tensor, epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches, all of one size: the images left over at the end of an epoch are dropped."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=generator)
        for rows in order[: len(x) // BATCH * BATCH].view(-1, BATCH):
            yield x[rows], y[rows]


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of one batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def run(
    model_name: str,
    compressed: bool,
    seed: int = 0,
    epochs: int = EPOCHS,
    inner: str = "inductor",
    budget_bits: float = 4.0,
) -> RunResult:
    """Train one of ``MODELS`` from scratch and test it."""
    torch.compiler.reset()
    torch.manual_seed(seed)
    model = MODELS[model_name]()
    x_train, x_test, y_train, y_test = digits()
    if compressed:
        sample = list(batches(x_train, y_train, epochs=1, seed=seed + 1))[:2]
        gact_fx.compile(model, budget_bits=budget_bits, sample_batches=sample, loss_fn=loss_fn, inner=inner)
    else:
        model.compile(backend="inductor" if inner == "inductor" else "aot_eager")

    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    steps = epochs * (len(x_train) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.5e-3, total_steps=steps)
    losses: list[float] = []
    seconds: list[float] = []
    held = 0
    for x, y in batches(x_train, y_train, epochs, seed):
        start = time.perf_counter()
        loss = loss_fn(model, (x, y))
        if not losses:  # what autograd holds now, before backward frees it
            held = held_bytes(loss, model, [x, y])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)

    model.eval()
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).double().mean().item()
    report = gact_fx.inspect(model) if compressed else None
    name, score = run_name(compressed, budget_bits), f"{100 * accuracy:.1f} %"
    return RunResult(model_name, name, accuracy, score, held, losses, seconds, report)


def main() -> None:
    """Run all four, print the table and draw the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"default {EPOCHS}")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the batches")
    parser.add_argument("--budget-bits", type=float, default=4.0, help="average bits per element, default 4")
    parser.add_argument("--output", default="digits.png", help="where the figure goes, default digits.png")
    parser.add_argument("--inner", choices=["inductor", "eager"], default="inductor", help="compiler of the graphs")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error("--epochs must be at least 1")
    try:
        gact_fx.Config(budget_bits=options.budget_bits)
    except ValueError as error:
        parser.error(str(error))
    results = [
        run(model, compressed, options.seed, options.epochs, options.inner, options.budget_bits)
        for model in MODELS
        for compressed in (False, True)
    ]
    print(table(results, "test accuracy"))
    draw(results, "test accuracy", options.output)
    print(f"loss curves and bits: {options.output}")


if __name__ == "__main__":
    main()
