"""Train a small BERT to fill in masked bytes of a text, with exact and with compressed activations.

A ``transformers`` BERT (random weights, dropout on, nothing is downloaded) learns a text file once in plain
``torch.compile`` and once in ``gact_fx.compile``, from the same weights and on the same batches. The model returns its
own loss and the batches are its keyword arguments, so ``gact_fx.compile`` needs no ``loss_fn``. The table says what
compression did to the validation loss, to the bytes held between forward and backward and to the time of a step; the
figure shows the loss curves and the bits that were chosen for every tensor.

    python examples/finetune_transformer.py                              # two minutes on two cores; writes bert.png
    python examples/finetune_transformer.py --text book.txt --steps 1000 --length 256
    python examples/finetune_transformer.py --inner eager                # needs no C++ compiler

Without ``--text`` it reads the help topics that come with Python.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from comparison import RunResult, draw, held_bytes, run_name, table
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

import gact_fx

MASK = 256  # the one token beyond the 256 bytes
MASKED_SHARE = 0.15
IGNORED = -100  # label of a position that does not count
VALIDATION_BATCHES = 8


@dataclass(frozen=True)
class Options:
    """What both runs share."""

    steps: int = 500
    seed: int = 0
    budget_bits: float = 4.0
    batch_size: int = 16
    length: int = 64
    inner: str = "inductor"


def read_text(path: str | None) -> bytes:
    """The bytes of a file, or of Python's help topics.

    Raises:
        OSError: the file cannot be read.
    """
    if path is not None:
        return Path(path).read_bytes()
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def split(text: bytes, length: int) -> tuple[Tensor, Tensor]:
    """Rows of ``length`` bytes for training, and every tenth row for validation.

    Raises:
        ValueError: the text is too short for one row in each.
    """
    count = len(text) // length
    if count < 10:
        raise ValueError(f"the text has {len(text)} bytes; at --length {length} it needs at least {10 * length}")
    rows = torch.tensor(list(text[: count * length])).view(count, length)
    held_out = torch.arange(count) % 10 == 9
    return rows[~held_out], rows[held_out]


def draw_batch(rows: Tensor, size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """``size`` random rows with some bytes masked, and as labels the bytes behind the masks."""
    tokens = rows[torch.randint(len(rows), (size,), generator=generator)]
    masked = torch.rand(tokens.shape, generator=generator) < MASKED_SHARE
    return {"input_ids": tokens.masked_fill(masked, MASK), "labels": tokens.masked_fill(~masked, IGNORED)}


def build_model(length: int) -> BertForMaskedLM:
    """Four layers of width 128, with BERT's usual dropout of 0.1 after every block and on the attention."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=MASK + 1,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=length,
            initializer_range=0.06,  # BERT's 0.02 suits a width of 768
        )
    )


def run(text: bytes, compressed: bool, options: Options) -> RunResult:
    """Train a new model on ``text`` and measure its loss on the held-out part.

    Raises:
        ValueError: the text is too short, or an option out of gact_fx's range.
    """
    torch.compiler.reset()
    torch.manual_seed(options.seed)
    train_rows, validation_rows = split(text, options.length)
    model = build_model(options.length)
    if compressed:
        other = torch.Generator().manual_seed(options.seed + 1)
        sample = [draw_batch(train_rows, options.batch_size, other) for _ in range(2)]
        gact_fx.compile(model, budget_bits=options.budget_bits, sample_batches=sample, inner=options.inner)
    else:
        model.compile(backend="inductor" if options.inner == "inductor" else "aot_eager")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=options.steps)
    order = torch.Generator().manual_seed(options.seed)
    losses: list[float] = []
    seconds: list[float] = []
    held = 0
    for _ in range(options.steps):
        batch = draw_batch(train_rows, options.batch_size, order)
        start = time.perf_counter()
        loss = model(**batch).loss
        if not losses:  # what autograd holds now, before backward frees it
            held = held_bytes(loss, model, [*batch.values()])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)

    report = gact_fx.inspect(model) if compressed else None
    validation = validate(model, validation_rows, options.batch_size)
    name = run_name(compressed, options.budget_bits)
    return RunResult("BERT", name, validation, f"{validation:.3f}", held, losses, seconds, report)


def validate(model: BertForMaskedLM, rows: Tensor, batch_size: int) -> float:
    """Mean loss in eval mode on masked batches that are the same at every call."""
    model.train(False)
    generator = torch.Generator().manual_seed(0)
    batches = [draw_batch(rows, batch_size, generator) for _ in range(VALIDATION_BATCHES)]
    with torch.no_grad():
        return statistics.fmean(model(**batch).loss.item() for batch in batches)


def main() -> None:
    """Run both and print the table."""
    defaults = Options()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--text", help="file to learn (default: the help topics that come with Python)")
    for name, kind in (("steps", int), ("seed", int), ("budget_bits", float), ("batch_size", int), ("length", int)):
        value = getattr(defaults, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value, help=f"default {value}")
    parser.add_argument("--output", default="bert.png", help="where the figure goes, default bert.png")
    parser.add_argument("--inner", choices=["inductor", "eager"], default=defaults.inner, help="compiler of the graphs")
    arguments = vars(parser.parse_args())
    path, output = arguments.pop("text"), arguments.pop("output")
    options = Options(**arguments)
    for name in ("steps", "batch_size", "length"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    try:
        text = read_text(path)
        split(text, options.length)
        gact_fx.Config(budget_bits=options.budget_bits)
    except (OSError, ValueError) as error:
        parser.error(f"cannot read --text {path}: {error.strerror}" if isinstance(error, OSError) else str(error))
    print(f"{len(text)} bytes of text, {options.steps} steps of {options.batch_size} rows of {options.length} bytes")
    results = [run(text, compressed, options) for compressed in (False, True)]
    print(table(results, "validation loss"))
    draw(results, "validation loss", output)
    print(f"loss curves and bits: {output}")


if __name__ == "__main__":
    main()
