"""Train a language model with the Trainer of ``transformers``, activations in 4 bits.

    python examples/train_with_hf_trainer.py

A small Llama with random weights (nothing is downloaded) learns which token follows which. The callback
compiles the model when training begins, adds what that saves to the Trainer's log, and keeps the plan beside every
checkpoint, so that ``trainer.train(resume_from_checkpoint=True)`` goes on with it. The model saves, loads and evaluates
as ever.

You may set ``loss_only=True`` if nobody reads the logits of training steps: no label smoothing in the Trainer, no
``compute_loss_func``, and no ``compute_loss`` of your own that reads them. Memory then never holds all of the logits,
which would be the largest tensor of the step. Evaluation runs without gradients and has real logits.

After ``import gact_fx.accelerate``, ``TrainingArguments(torch_compile=True, torch_compile_backend="gact")`` compiles
with default options, graph by graph, and without a report.
"""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import gact_fx
from gact_fx.integrations import GactTrainerCallback

# So many logits are split: 8 x 128 x 4096. The rows have 512 of the tokens.
VOCABULARY, USED, LENGTH, ROWS = 4096, 512, 128, 8


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of tokens, each of which follows from the one before."""

    def __init__(self, count: int, seed: int) -> None:
        rows = [torch.randint(0, USED, (count,), generator=torch.Generator().manual_seed(seed))]
        for _ in range(LENGTH - 1):
            rows.append((5 * rows[-1] + 1) % USED)
        self.tokens = torch.stack(rows, 1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.tokens[index]
        return {"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}


def train(steps: int = 40, inner: str = "inductor") -> tuple[float, gact_fx.Report]:
    """The loss on rows not trained on, and what was compressed."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
            max_position_embeddings=LENGTH,
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=ROWS, learning_rate=1e-2, report_to=[],
            save_strategy="no", logging_steps=max(steps // 5, 1), disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        callback = GactTrainerCallback(budget_bits=4, loss_only=True, inner=inner)
        trainer = Trainer(model, arguments, train_dataset=Rows(1024, 1), callbacks=[callback])
        trainer.train()
        return trainer.evaluate(Rows(32, 2))["eval_loss"], gact_fx.inspect(model)


def main() -> None:
    loss, report = train()
    print(f"loss {loss:.3f}; held for backward {report.bytes_after / 1e6:.2f} MB instead of "
          f"{report.bytes_before / 1e6:.2f} MB ({report.ratio:.1f}x)")  # fmt: skip


if __name__ == "__main__":
    main()
