"""Softmax over scores that were capped by tanh: neither the scores nor their exponential need exact storage."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import relative_error
from torch import nn
from torch.nn import functional as F

import gact_fx

X = torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 100, (256,), generator=torch.Generator().manual_seed(1))


class Capped(nn.Module):
    """Attention and a cross-entropy, whose scores ``cap`` bends."""

    def __init__(self, cap: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 100)
        self.cap = cap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.cap(self.q(x) @ self.k(x).mT / 32**0.5)
        future = torch.ones(64, 64, dtype=torch.bool).triu(1)
        x = scores.masked_fill(future, float("-inf")).softmax(-1) @ x
        return F.cross_entropy(self.cap(self.head(x)).flatten(0, 1), LABELS)


def soft(x: torch.Tensor) -> torch.Tensor:
    return 30 * torch.tanh(x / 30)


def steep(x: torch.Tensor) -> torch.Tensor:
    return 5 * torch.sigmoid(x)


def none(x: torch.Tensor) -> torch.Tensor:
    return x


def run(cap: Any, inner: str) -> tuple[float, gact_fx.Report]:
    """Relative error of the gradient at uniform 8 bits, and the report."""
    model = Capped(cap)
    exact = copy.deepcopy(model)
    exact(X).backward()
    gact_fx.compile(model, inner=inner, budget_bits=8, adaptive=False, min_elements=64, sample_batches=[X])
    model(X).backward()
    error = relative_error([p.grad for p in model.parameters()], [p.grad for p in exact.parameters()])  # type: ignore[misc]
    return error, gact_fx.inspect(model)


@pytest.mark.parametrize("inner", ["inductor", "eager"])
@pytest.mark.parametrize("cap", [soft, steep])
def test_capped_scores_are_stored_in_codes(cap: Any, inner: str) -> None:
    error, report = run(cap, inner)
    kept = [row for row in report.rows if row.encoding == "keep" and row.bytes_after > 4096]
    assert not kept, kept
    assert error < 0.02


def test_scores_that_nothing_bends_are_saved_once() -> None:
    """Of the head the exponential alone, or what it is computed from; attention's are computed again."""
    _, report = run(none, "inductor")
    scores = [row for row in report.rows if row.bytes_after and row.numel in (4 * 64 * 64, 256 * 100)]
    assert len(scores) == 1 and {row.encoding for row in scores} == {"quantize"}
