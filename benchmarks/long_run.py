"""A thousand training steps of a small BERT: resident memory, loss, and whether a second run gives the same bits.

    python benchmarks/long_run.py [--steps 1000] [--budget-bits 4] [--inner inductor]

Two fresh processes train a BERT of two layers (dropout on, AdamW) on tokens of which the label is a function, profiled
on the first training step. Memory is the resident set (VmRSS) after every twentieth of the steps; "growth" is the
largest of them in the last three quarters less the one at a quarter. The digest is SHA-256 over all parameters and
losses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from machine import describe, save

import gact_fx

ROWS, LENGTH, TOKENS = 16, 64, 100


def resident() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def build() -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, vocab_size=TOKENS
    )
    return BertForSequenceClassification(config)


def train(steps: int, **options: Any) -> dict[str, Any]:
    """Resident memory and mean loss by twentieth of the steps, and the digest."""
    torch.manual_seed(0)
    model = gact_fx.compile(build(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    draw = torch.Generator().manual_seed(1)
    losses: list[float] = []
    memory: list[int] = []
    every = max(steps // 20, 1)
    for step in range(1, steps + 1):
        tokens = torch.randint(0, TOKENS, (ROWS, LENGTH), generator=draw)
        labels = (tokens < TOKENS // 2).sum(1).gt(LENGTH // 2).long()
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % every == 0:
            memory.append(resident())
    digest = hashlib.sha256(repr(losses).encode())
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    means = [sum(losses[i : i + every]) / every for i in range(0, every * len(memory), every)]
    return {"every": every, "memory": memory, "losses": means, "digest": digest.hexdigest()}


def train_elsewhere(arguments: list[str]) -> dict[str, Any]:
    """What :func:`train` gives in a fresh process."""
    command = [sys.executable, __file__, *arguments, "--child"]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--budget-bits", type=float, default=4.0)
    parser.add_argument("--inner", default="inductor")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # train here, print JSON
    options = parser.parse_args()
    if options.child:
        print(json.dumps(train(options.steps, budget_bits=options.budget_bits, inner=options.inner)))
        return
    runs = [train_elsewhere(sys.argv[1:]) for _ in range(2)]
    first, second = runs
    print(f"{options.steps} steps of BERT at {options.budget_bits:g} bits, inner={options.inner}; {describe()}")
    print(f"{'step':>6} {'loss':>8} {'resident, run 1':>16} {'run 2':>10}")
    for row, (loss, *memory) in enumerate(zip(first["losses"], *(run["memory"] for run in runs), strict=True), start=1):
        print(f"{row * first['every']:6} {loss:8.4f} {memory[0] / 1e6:13.1f} MB {memory[1] / 1e6:7.1f} MB")
    quarter = len(first["memory"]) // 4
    growth = [max(run["memory"][quarter:]) - run["memory"][quarter - 1] for run in runs]
    print(f"growth: {', '.join(f'{g / 1e6:.1f} MB' for g in growth)}; same bits: {first['digest'] == second['digest']}")
    save(f"long-run-{options.budget_bits:g}bits", {"runs": runs, "growth": growth})


if __name__ == "__main__":
    main()
