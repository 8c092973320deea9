"""The gradient of an embedding is scattered when the products behind the embedding are done."""

import pytest
import torch
from conftest import Trace, gradients, relative_error, run_pass
from peak_bytes import peak_bytes
from torch import nn

import gact_fx

ROWS, WIDTH, LENGTH, WORDS = 8, 64, 128, 20_000
BEHIND = torch.ops.gact_fx.behind.default
both_compilers = pytest.mark.both_compilers


class Embedded(nn.Module):
    """Three layers that read one normalised embedding, and their product."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm = nn.Embedding(words, WIDTH), nn.LayerNorm(WIDTH)
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(tokens)).tanh()
        return (self.one(x).sin() * self.two(x).sin() * self.three(x).sin()).square().mean()


@pytest.mark.parametrize(
    ("words", "inner", "late"), [(WORDS, "inductor", 1), (WORDS, "eager", 0), (100, "inductor", 0)]
)
def test_large_tables_alone(trace: Trace, words: int, inner: str, late: int) -> None:
    pair = trace(Embedded(words), torch.randint(0, words, (ROWS, LENGTH)), inner="inductor", recompute="auto")
    run_pass("scatter_late", pair, inner=inner)
    assert len(pair.backward.graph.find_nodes(op="call_function", target=BEHIND)) == late


@both_compilers
@pytest.mark.parametrize("inner", ["inductor"])
def test_the_peak_holds_the_table_alone(inner: str) -> None:
    model, reference, tokens = Embedded(), Embedded(), torch.randint(0, WORDS, (ROWS, LENGTH))
    gact_fx.compile(model, budget_bits=8, adaptive=False, inner=inner)
    model(tokens).backward()
    model.zero_grad()
    peak = peak_bytes(lambda: model(tokens))
    reference(tokens).backward()
    assert relative_error(gradients(model), gradients(reference)) < 0.02
    activation = ROWS * LENGTH * WIDTH * 4
    assert peak.step - peak.left < 2 * activation
