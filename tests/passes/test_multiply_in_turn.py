"""In backward of attention that is spelled out, a gradient meets the probabilities before these get theirs."""

import pytest
import torch
from conftest import gradients, relative_error
from peak_bytes import peak_bytes
from torch import nn
from torch.nn import functional as F

import gact_fx

ROWS, WIDTH, HEADS, LENGTH = 2, 64, 4, 512
SLOW = pytest.mark.slow
SCORES = ROWS * HEADS * LENGTH * LENGTH * 4


class Attention(nn.Module):
    """Attention with dropout, which PyTorch spells out on the CPU, or a model does."""

    def __init__(self, dropout: float, spells_out: bool = True, cap: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout, self.spells_out, self.cap = dropout, spells_out, cap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.project(x).chunk(3, dim=-1))
        if self.spells_out:
            scores = q @ k.mT / (WIDTH // HEADS) ** 0.5
            if self.cap:
                scores = self.cap * (scores / self.cap).tanh()
            found = F.dropout(scores.softmax(-1), self.dropout) @ v
        else:
            found = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2)).square().sum()


@pytest.mark.both_compilers
@pytest.mark.parametrize("inner", ["inductor"])
@pytest.mark.parametrize("spells_out", [True, pytest.param(False, marks=SLOW)])
def test_no_more_than_two_tensors_of_scores(inner: str, spells_out: bool) -> None:
    model, x = Attention(0.1, spells_out), torch.randn(ROWS, LENGTH, WIDTH)
    gact_fx.compile(model, budget_bits=8, adaptive=False, inner=inner)
    model(x).backward()
    model.zero_grad()
    peak = peak_bytes(lambda: model(x))
    assert peak.step < 2.6 * SCORES, peak  # and their mask, of a quarter of their bytes


@pytest.mark.both_compilers
@pytest.mark.parametrize("inner", ["inductor"])
@pytest.mark.parametrize(
    ("dropout", "cap"), [pytest.param(0.0, 0.0, marks=SLOW), pytest.param(0.5, 0.0, marks=SLOW), (0.5, 0.3)]
)
def test_gradients_are_those_of_what_forward_drew(inner: str, dropout: float, cap: float) -> None:
    """As torch.compile's with the same seed, which draws the same numbers."""
    model, reference = Attention(dropout, cap=cap), Attention(dropout, cap=cap)
    x = torch.randn(ROWS, LENGTH, WIDTH)
    gact_fx.compile(model, budget_bits=8, adaptive=False, inner=inner)
    model(x).backward()
    model.zero_grad()
    compiled = torch.compile(reference)
    for each in (model, compiled):
        torch.manual_seed(1)
        each(x).backward()
    assert relative_error(gradients(model), gradients(reference)) < 0.02
