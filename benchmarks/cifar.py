"""Test accuracy of a small residual CNN on CIFAR-10 (10000 images to train on, 2000 to test): torch.compile, gact_fx.

    python benchmarks/cifar.py [--budget-bits 4 2] [--seeds 3] [--epochs 10] [--profile-every 200]

All runs of a seed have the same initial weights, the same batches in the same order and the same augmentation (random
crop after padding by 4 pixels, random flip). SGD with momentum, one cycle of the learning rate down to zero. gact_fx
profiles every 200 steps again, and plans anew where that is worth it.

The difference between two trainings on 2000 images is noisy. To make it less so, in all runs alike: tested is the
exponential moving average of the weights (decay 0.99 a step, batch norm's statistics too), once, after the last step;
the logits of every image and of its mirror image are averaged. Tests run in eager mode, so that they are the same code
for all. "+-" is the standard error of the mean difference that comes from the choice of test images: from the scatter,
over images, of how many seeds have them right in one way and not in the other.
"""

from __future__ import annotations

import argparse
import time

import torch
from machine import describe, save
from real_data import cifar10
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gact_fx

BATCH = 100
EPOCHS = 10
PROFILE_EVERY = 200
MAX_RATE = 0.2
Data = tuple[Tensor, Tensor, Tensor, Tensor]
Batch = tuple[Tensor, Tensor]


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
    """A strided stem, and a residual block in each of three stages: 16x16, 8x8, 4x4."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def augment(x: Tensor, generator: torch.Generator) -> Tensor:
    """Every image moved by up to 4 pixels each way, and half of them mirrored."""
    size = x.shape[-1]
    windows = F.pad(x, (4, 4, 4, 4)).unfold(2, size, 1).unfold(3, size, 1)  # image, channel, down, right, size, size
    down, right = torch.randint(9, (2, len(x)), generator=generator)
    moved = windows[torch.arange(len(x)), :, down, right]
    mirrored = torch.rand(len(x), 1, 1, 1, generator=generator) < 0.5
    return torch.where(mirrored, moved.flip(3), moved)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(budget_bits: float | None, seed: int, epochs: int, data: Data, profile_every: int) -> Tensor:
    """Train a new network; which test images it has right, as 0 and 1. ``budget_bits`` None: torch.compile."""
    torch.compiler.reset()
    torch.manual_seed(seed)
    x_train, y_train, x_test, y_test = data
    model = ResidualCNN()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
    if budget_bits is None:
        model.compile()
    else:
        other = torch.Generator().manual_seed(seed + 1)
        rows = torch.randperm(len(x_train), generator=other)[:BATCH]
        sample = (augment(x_train[rows], other), y_train[rows])
        every = profile_every or None
        gact_fx.compile(model, budget_bits=budget_bits, profile_every=every, sample_batches=[sample], loss_fn=loss_fn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    batches = len(x_train) // BATCH  # what is left over is dropped, so that all batches have one shape
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=MAX_RATE, total_steps=epochs * batches, cycle_momentum=False
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(x_train), generator=generator)
        for rows in order[: batches * BATCH].view(batches, BATCH):
            loss = loss_fn(model, (augment(x_train[rows], generator), y_train[rows]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
    return test(average.module, x_test, y_test)


def test(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        return (torch.cat([model(part) + model(part.flip(3)) for part in x.split(500)]).argmax(1) == y).double()


def way_name(budget_bits: float | None) -> str:
    return "torch.compile" if budget_bits is None else f"gact_fx, {budget_bits:g} bits"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-bits", type=float, nargs="+", default=[4.0, 2.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--profile-every", type=int, default=PROFILE_EVERY, help="steps; 0: plan once, before the first"
    )
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    options = parser.parse_args()
    data = cifar10()
    ways: list[float | None] = [None, *options.budget_bits]
    print(f"test accuracy in percent on CIFAR-10 (subset), {options.epochs} epochs; {describe()}")
    right: dict[str, list[Tensor]] = {way_name(way): [] for way in ways}
    for seed in range(options.seeds):
        for way in ways:
            start = time.perf_counter()
            found = train(way, seed, options.epochs, data, options.profile_every)
            right[way_name(way)].append(found)
            seconds = time.perf_counter() - start
            print(f"seed {seed}  {way_name(way):16} {100 * found.mean():.2f}   {seconds:.0f} s", flush=True)
    save("cifar", report(right))


def report(right: dict[str, list[Tensor]]) -> dict[str, dict[str, float | list[float]]]:
    """Print the table; the same figures by way."""
    each_width = 7 * len(right["torch.compile"])
    print(f"\n{'way':16} {'each seed':{each_width}} {'mean':>7}   difference from torch.compile")
    plain = torch.stack(right["torch.compile"]).mean(0)
    results: dict[str, dict[str, float | list[float]]] = {}
    for way, found in right.items():
        each = [100 * seed.mean().item() for seed in found]
        difference = 100 * (torch.stack(found).mean(0) - plain)
        mean, error = difference.mean().item(), difference.std().item() / len(plain) ** 0.5
        results[way] = {"each": each, "mean": sum(each) / len(each), "difference": mean, "standard error": error}
        cells = "".join(f"{value:7.2f}" for value in each)
        against = "" if way == "torch.compile" else f"   {mean:+.2f} +- {error:.2f}"
        print(f"{way:16} {cells:{each_width}} {sum(each) / len(each):7.2f}{against}")
    return results


if __name__ == "__main__":
    main()
