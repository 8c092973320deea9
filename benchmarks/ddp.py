"""Two processes under DistributedDataParallel (gloo) beside one on the joined batch: plans, parameters, losses.

    python benchmarks/ddp.py [--steps 20] [--budget-bits 4] [--inner inductor]

A transformer encoder layer with a classifier learns to name the largest of eight numbers. Each of the two ranks takes
half of every batch of 128 rows, and profiles its own half in the first step. Asked is whether after the last step both
have the same plan and the same parameters, bit for bit; and whether the losses (mean of the ranks') lie as near to
those of one process on the joined batch as that process' own losses lie to each other with other seeds of the rounding
noise ("noise": the largest difference at any step, the same initial weights and data).
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from machine import describe, save
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gact_fx

ROWS, LENGTH, WIDTH, RANKS = 128, 8, 64, 2
SEEDS = (1, 2, 3)


class Net(nn.Module):
    """Which of LENGTH numbers is the largest?"""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.first(x.unsqueeze(2)))
        return F.cross_entropy(self.head(h).squeeze(2), x.argmax(1))


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(step))


def train(steps: int, rank: int, ranks: int, **options: Any) -> dict[str, Any]:
    """Losses, plan and parameters of a training with this rank's share of every batch."""
    torch.manual_seed(0)
    net = gact_fx.compile(Net(), **options)
    model: nn.Module = DistributedDataParallel(net) if ranks > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step).chunk(ranks)[rank])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    plan = gact_fx.inspect(net).plan
    assert plan is not None
    return {"losses": losses, "plan": asdict(plan), "parameters": [p.detach() for p in net.parameters()]}


def work(rank: int, port: int, folder: str, steps: int, options: dict[str, Any]) -> None:
    torch.set_num_threads(max((os.cpu_count() or RANKS) // RANKS, 1))
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    torch.save(train(steps, rank, RANKS, **options), Path(folder, str(rank)))
    distributed.destroy_process_group()


def train_together(steps: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What :func:`train` gives on both ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (port, folder, steps, options), RANKS)  # type: ignore[attr-defined, no-untyped-call, unused-ignore]
        return [torch.load(Path(folder, str(rank))) for rank in range(RANKS)]


def furthest(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--budget-bits", type=float, default=4.0)
    parser.add_argument("--inner", default="inductor")
    options = parser.parse_args()
    logging.getLogger("gact_fx").setLevel(logging.ERROR)
    ways = {"budget_bits": options.budget_bits, "inner": options.inner}
    one, other = train_together(options.steps, ways)
    joined = [train(options.steps, 0, 1, seed=seed, **ways)["losses"] for seed in (0, *SEEDS)]
    losses = [(a + b) / 2 for a, b in zip(one["losses"], other["losses"], strict=True)]
    pairs = [(left, right) for index, left in enumerate(joined) for right in joined[:index]]
    results = {
        "plans": one["plan"] == other["plan"],
        "parameters": all(torch.equal(a, b) for a, b in zip(one["parameters"], other["parameters"], strict=True)),
        "ddp": losses,
        "joined": joined[0],
        "difference": furthest(losses, joined[0]),
        "noise": max(furthest(left, right) for left, right in pairs),
    }
    bits = f"{options.budget_bits:g} bits, inner={options.inner}"
    print(f"DDP over gloo, {RANKS} processes, {options.steps} steps at {bits}; {describe()}")
    print(f"{'step':>4} {'DDP':>8} {'joined':>8} " + " ".join(f"{f'seed {seed}':>8}" for seed in SEEDS))
    for step, row in enumerate(zip(losses, *joined, strict=True)):
        print(f"{step:4} " + " ".join(f"{loss:8.4f}" for loss in row))
    print(f"plans identical: {results['plans']}; parameters identical: {results['parameters']}")
    print(f"largest difference of losses: {results['difference']:.4f}; among seeds: {results['noise']:.4f}")
    save(f"ddp-{options.budget_bits:g}bits", results)


if __name__ == "__main__":
    main()
