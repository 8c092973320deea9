"""Results of batched products that backward computes again from factors that it reads anyway."""

import copy
from collections.abc import Callable

import pytest
import torch
from conftest import Trace, gradients, relative_error
from torch import nn

import gact_fx
from gact_fx.graphs.aot import GraphPair

INNER = pytest.mark.parametrize("inner", ["inductor", "eager"])
WIDTH, HEADS = 64, 4


class Attention(nn.Module):
    """Attention as models spell it out; ``after`` is what its output goes through."""

    def __init__(self, after: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length = x.shape[:2]
        q, k, v = self.project(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (WIDTH / HEADS) ** -0.5
        found = (scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, WIDTH)
        return self.out(self.after(found)).square().mean()


def batched_products(pair: GraphPair) -> int:
    """How many of them backward computes. Attention's gradient alone takes four."""
    return len(pair.backward.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default))


@INNER
@pytest.mark.parametrize(
    ("length", "after", "recompute", "products"),
    [
        (16, lambda x: x, "auto", 5),
        (16, lambda x: x, "off", 4),
        # A function that bends reads it.
        (16, torch.tanh, "auto", 4),
        # Computing it again takes longer than the layer behind it.
        (80, lambda x: x, "auto", 4),
    ],
)
def test_the_output_of_attention(
    trace: Trace, inner: str, length: int, after: Callable[[torch.Tensor], torch.Tensor], recompute: str, products: int
) -> None:
    pair = trace(Attention(after), torch.randn(4, length, WIDTH), inner=inner, recompute=recompute)
    assert batched_products(pair) == products


def test_a_product_with_a_parameter_is_saved(trace: Trace) -> None:
    """Backward has no need of the other factor, for which there is no gradient."""
    table, weight = torch.randn(4, 16, 16), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def function(x: torch.Tensor) -> torch.Tensor:
        return (torch.bmm(table, (x @ weight).tanh()) @ weight).square().mean()

    pair = trace(function, torch.randn(4, 16, WIDTH), recompute="auto")
    assert batched_products(pair) == 1


@INNER
def test_gradients(inner: str) -> None:
    exact = Attention()
    model = gact_fx.compile(copy.deepcopy(exact), inner=inner, budget_bits=8, min_elements=64)
    for rows in (8, 8, 6):
        batch = torch.randn(rows, 16, WIDTH)
        for network in (model, exact):
            network.zero_grad()
            network(batch).backward()
        assert relative_error(gradients(model), gradients(exact)) < 0.01
