"""Fine-tune with the Trainer of ``transformers``, activations in 4 bits.

    python examples/train_with_hf_trainer.py

A small BERT with random weights (nothing is downloaded) learns whether a row of tokens has more of one token than of
another. The callback compiles the model when training begins, adds what that saves to the Trainer's log, and keeps the
plan beside every checkpoint, so that ``trainer.train(resume_from_checkpoint=True)`` goes on with it. The model saves,
loads and evaluates as ever.
After ``import gact_fx.accelerate``, ``TrainingArguments(torch_compile=True, torch_compile_backend="gact")`` does the
same with default options, graph by graph, and without a report.
"""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, Trainer, TrainingArguments

import gact_fx
from gact_fx.integrations import GactTrainerCallback


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of 32 tokens; the label says whether there are more ones than twos."""

    def __init__(self, count: int, seed: int) -> None:
        self.tokens = torch.randint(0, 8, (count, 32), generator=torch.Generator().manual_seed(seed))
        self.labels = ((self.tokens == 1).sum(1) > (self.tokens == 2).sum(1)).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def train(steps: int = 300, inner: str = "inductor") -> tuple[float, gact_fx.Report]:
    """Accuracy on rows not trained on, and what was compressed."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=8, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
            max_position_embeddings=32,
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=32, learning_rate=1e-3, report_to=[],
            save_strategy="no", logging_steps=max(steps // 5, 1), disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        callback = GactTrainerCallback(budget_bits=4, inner=inner)
        rows = Rows(2048, 1)
        trainer = Trainer(model, arguments, train_dataset=rows, compute_metrics=accuracy, callbacks=[callback])
        trainer.train()
        return trainer.evaluate(Rows(512, 2))["eval_accuracy"], gact_fx.inspect(model)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    right = np.asarray(prediction.predictions).argmax(-1) == prediction.label_ids
    return {"accuracy": float(right.mean())}


def main() -> None:
    found, report = train()
    print(f"accuracy {found:.3f}; held for backward {report.bytes_after / 1e6:.2f} MB instead of "
          f"{report.bytes_before / 1e6:.2f} MB ({report.ratio:.1f}x)")  # fmt: skip


if __name__ == "__main__":
    main()
