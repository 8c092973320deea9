"""Small views of large memory are copied, so that the memory goes."""

from typing import Any

import pytest
import torch
from activation_bytes import activation_bytes
from conftest import Trace, analyze, gradients, relative_error
from torch import nn

import gact_fx
from gact_fx.passes.encodings import Copy
from gact_fx.passes.graph_analysis import GraphAnalysis


class FirstToken(nn.Module):
    """A classifier on the first token of a sequence, as in ViT and BERT; the other tokens lead to the loss as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 64)
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        return self.head(y[:, 0]).square().sum() + y.sum()


def copied(analysis: GraphAnalysis) -> list[str]:
    return [t.op for t, how in analysis.pairs() if isinstance(how, Copy)]


@pytest.mark.both_compilers
@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("rows", [8, 1])
def test_the_first_token_does_not_hold_the_sequence(inner: str, rows: int) -> None:
    model, x = FirstToken(), torch.randn(rows, 100, 16)
    model(x).backward()
    exact = gradients(model)
    gact_fx.compile(model, budget_bits=8, inner=inner, recompute="off", sample_batches=[(x,)], loss_fn=own_loss)
    loss = model(x)
    report, held = gact_fx.inspect(model), activation_bytes(loss, exclude=[*model.parameters(), x])
    (row,) = [row for row in report.rows if row.op == "aten.select.int"]
    assert row.encoding == "keep" and row.bytes_after == 4 * 64 * rows and "fewer than" in row.reason
    assert held == report.bytes_after < 4 * 64 * rows * 10
    loss.backward()
    assert relative_error(gradients(model), exact) < 1e-2


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(*batch)
    return loss


def test_what_shares_the_memory_is_compressed(trace: Trace) -> None:
    w, many, one = (nn.Parameter(torch.randn(*shape)) for shape in ((16, 32), (10, 4), (60,)))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        return (y[:, 2:12] @ many).sin().sum() + y[:, 31] @ one

    analysis = analyze(trace(function, torch.randn(60, 16)))
    assert copied(analysis) == ["aten.select.int"]
    assert "aten.slice.Tensor" in [t.op for t, _ in analysis.quantized()]


def test_the_order_of_dimensions_stays(trace: Trace) -> None:
    w = nn.Parameter(torch.randn(16, 32))
    analysis = analyze(trace(lambda x: (x @ w).view(4, 10, 32)[:, :2, :4].mT.sin().sum(), torch.randn(40, 16)))
    assert [how.order for _, how in analysis.pairs() if isinstance(how, Copy)] == [(0, 2, 1)]


def test_what_somebody_else_holds_is_not_copied(trace: Trace) -> None:
    w = nn.Parameter(torch.randn(16, 32))

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ w
        return y, y[:, 3].sin().sum()

    assert copied(analyze(trace(function, torch.randn(60, 16)))) == []


def test_what_inductor_would_not_copy_is_kept(trace: Trace) -> None:
    w = nn.Parameter(torch.randn(16, 32))
    assert copied(analyze(trace(lambda x: (x @ w)[:1].sin().sum(), torch.randn(60, 16)))) == []


def test_most_of_the_memory_is_not_copied(trace: Trace) -> None:
    w = nn.Parameter(torch.randn(16, 3))
    assert copied(analyze(trace(lambda x: (x @ w)[:, 1:].sin().sum(), torch.randn(15, 16)))) == []
