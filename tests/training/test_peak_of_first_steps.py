"""The steps that profile take little more memory than planned ones, and at most half of what torch.compile takes."""

from __future__ import annotations

import copy

import pytest
import torch
from peak_bytes import peak_bytes
from torch import Tensor, nn
from torch.nn import functional as F

import gact_fx

ROWS, VOCABULARY = 128, 4096


class Transformer(nn.Module):
    """Three encoder layers with dropout, and a mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layers(x)
        return hidden.float().square().mean()


class LanguageModel(Transformer):
    """The same, with a head of 4096 words and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        labels = (x[..., 0] * 100).long().remainder(VOCABULARY)
        logits = self.head(self.layers(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Convolutions(nn.Module):
    """Thirteen convolutions with batch norm and ReLU, and sums around them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
                nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8),
            )
            for _ in range(6)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x[:, None, :, :32])
        for block in self.blocks:
            hidden = F.relu(hidden + block(hidden))
        return hidden.float().square().mean()


NETWORKS = (Transformer, LanguageModel, Convolutions)


def peaks(model: nn.Module, amp: bool) -> list[int]:
    """Bytes at the peak of each of the first three steps, above the gradients."""
    x = torch.randn(ROWS, 64, 64, generator=torch.Generator().manual_seed(0))
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            found: Tensor = model(x)
        return found

    found = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        found.append(peak_bytes(loss).step - gradients)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", NETWORKS)
def test_the_first_two_steps_fit_where_planned_ones_do(kind: type[nn.Module], amp: bool) -> None:
    torch.manual_seed(0)
    model = kind()
    other = copy.deepcopy(model)
    other.compile()
    *_, plain = peaks(other, amp)
    gact_fx.compile(model, budget_bits=4)
    *first, planned = peaks(model, amp)
    assert max(first) < 1.3 * planned and max(first) < 0.5 * plain
