"""Train a LightningModule, activations in 4 bits.

    python examples/train_with_lightning.py

The callback compiles the network inside the LightningModule, in place, when training begins, and keeps the plan in the
checkpoints; ``Trainer.fit`` and ``load_state_dict`` need no change. The digits are those that come with scikit-learn.
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gact_fx
from gact_fx.integrations import GactLightningCallback


class Digits(lightning.LightningModule):
    """A small residual-free CNN for 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64 * 4 * 4, 10),
        )  # fmt: skip

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.network(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def train(epochs: int = 5, inner: str = "inductor") -> tuple[float, gact_fx.Report]:
    """Accuracy on a fifth of the digits, and what was compressed."""
    lightning.seed_everything(0, verbose=False)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    data = TensorDataset(images, torch.tensor(labels))
    train_set, test_set = torch.utils.data.random_split(data, [0.8, 0.2])
    model = Digits()
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[GactLightningCallback(budget_bits=4, inner=inner)],
    )  # fmt: skip
    trainer.fit(model, DataLoader(train_set, 64, shuffle=True, drop_last=True))
    found = trainer.validate(model, DataLoader(test_set, 64), verbose=False)
    return found[0]["accuracy"], gact_fx.inspect(model.network)


def main() -> None:
    accuracy, report = train()
    print(f"accuracy {accuracy:.3f}; held for backward {report.bytes_after / 1e6:.2f} MB instead of "
          f"{report.bytes_before / 1e6:.2f} MB ({report.ratio:.1f}x)")  # fmt: skip


if __name__ == "__main__":
    main()
