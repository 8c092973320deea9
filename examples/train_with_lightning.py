"""Train a LightningModule, activations in 4 bits.

    python examples/train_with_lightning.py

The callback compiles the network inside the LightningModule, in place, when training begins, and keeps the plan in the
checkpoints; ``Trainer.fit`` and ``load_state_dict`` need no change. The network is a small language model that learns
which token follows which.

The network computes its own loss, and the training step reads nothing else. That is why ``loss_only=True`` may be set:
memory never holds all of the logits of a training step. Lightning validates without gradients, where logits are real.
"""

from typing import cast

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gact_fx
from gact_fx.integrations import GactLightningCallback

# So many logits are split: 8 x 128 x 4096. The rows have 512 of the tokens.
VOCABULARY, USED, LENGTH, ROWS = 4096, 512, 128, 8


class LanguageModel(nn.Module):
    """Two layers of a transformer; the loss of the next token, and the logits."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        tokens, following = rows[:, :-1], rows[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.tokens(tokens) + self.places.weight
        logits = self.head(self.layers(hidden, mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten()), logits


class Follower(lightning.LightningModule):
    """Trains a language model on its loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.network = LanguageModel()

    def training_step(self, batch: tuple[Tensor], index: int) -> Tensor:
        loss, _ = self.network(*batch)
        return cast(Tensor, loss)

    def validation_step(self, batch: tuple[Tensor], index: int) -> None:
        (rows,) = batch
        _, logits = self.network(rows)
        self.log("accuracy", (logits.argmax(-1) == rows[:, 1:]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def text(count: int) -> TensorDataset:
    """Rows of tokens, each of which follows from the one before."""
    rows = [torch.randint(0, USED, (count,))]
    for _ in range(LENGTH):
        rows.append((5 * rows[-1] + 1) % USED)
    return TensorDataset(torch.stack(rows, 1))


def train(steps: int = 40, inner: str = "inductor") -> tuple[float, gact_fx.Report]:
    """Accuracy on rows not trained on, and what was compressed."""
    lightning.seed_everything(0, verbose=False)
    model = Follower()
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[GactLightningCallback(budget_bits=4, loss_only=True, inner=inner)],
    )  # fmt: skip
    trainer.fit(model, DataLoader(text(1024), ROWS, shuffle=True))
    found = trainer.validate(model, DataLoader(text(16), ROWS), verbose=False)
    return found[0]["accuracy"], gact_fx.inspect(model.network)


def main() -> None:
    accuracy, report = train()
    print(f"accuracy {accuracy:.3f}; held for backward {report.bytes_after / 1e6:.2f} MB instead of "
          f"{report.bytes_before / 1e6:.2f} MB ({report.ratio:.1f}x)")  # fmt: skip


if __name__ == "__main__":
    main()
