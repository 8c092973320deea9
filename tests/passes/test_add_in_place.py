"""The gradient of an embedding whose weight has another gradient, too."""

import copy

import pytest
import torch
from conftest import gradients, relative_error
from peak_bytes import peak_bytes
from torch import nn
from torch.nn import functional as F

import gact_fx
from gact_fx.profiling import few_rows
from gact_fx.training import row_tracing


class Tied(nn.Module):
    """An embedding, and a layer with its weight."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(512, 32, padding_idx=padding), nn.Linear(32, 32)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.inner(self.embedding(tokens)))
        return F.cross_entropy(F.linear(hidden, self.embedding.weight).flatten(0, 1), labels.flatten())


WORDS = 200_000


class Head(nn.Module):
    """A language model with a large vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 64)
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.Tanh())

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.embedding(tokens))
        return F.cross_entropy(F.linear(hidden, self.embedding.weight).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_gradients_of_a_tied_weight(
    inner: str, padding: int | None, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_split:
        monkeypatch.setattr("gact_fx.passes.find_heads.MIN_NUMEL", 2**10)
    torch.manual_seed(0)
    model = Tied(padding)
    reference = copy.deepcopy(model)
    # Many of them the same, some of them padding.
    tokens, labels = torch.randint(0, 8, (16, 16)), torch.randint(0, 512, (16, 16))
    gact_fx.compile(model, budget_bits=8, inner=inner, min_elements=10**9)
    for _ in range(3):
        for network in (model, reference):
            network.zero_grad()
            network(tokens, labels).backward()
        assert relative_error(gradients(model), gradients(reference)) < 1e-5
    backward = gact_fx.inspect(model).graphs[0].backward.graph
    in_place = backward.find_nodes(op="call_function", target=torch.ops.aten.index_put_.default)
    # Inductor alone has embeddings taken apart.
    assert len(in_place) == (inner == "inductor")


def test_where_a_few_rows_are_measured_the_step_itself_adds_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step then holds one tensor as large as the table, and not two. What is measured writes nothing."""
    for module in (few_rows, row_tracing):
        monkeypatch.setattr(module, "ENOUGH_NBYTES", 2**13)
    model, reference = Head(), Head()
    tokens, labels = torch.randint(0, WORDS, (2, 8, 64))
    gact_fx.compile(model, budget_bits=4)
    peak = peak_bytes(lambda: model(tokens, labels))
    reference(tokens, labels).backward()
    assert relative_error(gradients(model), gradients(reference)) < 0.2
    table = WORDS * 64 * 4
    assert table < peak.step < 2 * table
    # The rows are measured as the next step begins, on a graph of which the derivative is taken.
    model(tokens, labels).backward()
    assert gact_fx.inspect(model).plan is not None
