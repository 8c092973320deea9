"""Attention that a model spells out: backward computes its probabilities again from query and key."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import gradients, relative_error
from torch import nn
from torch.nn import functional as F

import gact_fx

BOTH = pytest.mark.both_compilers
INNER = pytest.mark.parametrize("inner", ["inductor", "eager"])
WIDTH, HEADS, LENGTH = 32, 2, 64
Change = Callable[[torch.Tensor], torch.Tensor]


def softmax(scores: torch.Tensor) -> torch.Tensor:
    return scores.softmax(-1)


def causal(scores: torch.Tensor) -> torch.Tensor:
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1)


def divided(scores: torch.Tensor) -> torch.Tensor:
    return (scores / 4).softmax(-1)


def capped(scores: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(scores / 5) * 5).softmax(-1)


def in_float(scores: torch.Tensor) -> torch.Tensor:
    return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)


def largest_alone(scores: torch.Tensor) -> torch.Tensor:
    """What is left out is decided by the scores."""
    return scores.masked_fill(scores < scores.mean(-1, keepdim=True), -torch.inf).softmax(-1)


class Attention(nn.Module):
    """``probabilities`` of the scores, which ``sharpness`` multiplies; a bias that is added to them comes from a
    "parameter" or the "sequence".
    """

    def __init__(
        self, probabilities: Change = softmax, *, sharpness: float = 1.0, bias: str = "", returns: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.probabilities, self.sharpness, self.bias, self.returns = probabilities, sharpness, bias, returns
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.pairs = nn.Linear(WIDTH, HEADS)
        self.positions = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.project(x).chunk(3, dim=-1))
        scores = self.sharpness * q @ k.transpose(-1, -2) * (WIDTH / HEADS) ** -0.5
        if self.bias == "parameter":
            scores = scores + self.positions
        elif self.bias == "sequence":
            scores = scores + self.pairs(torch.sin(x.unsqueeze(1) + x.unsqueeze(2))).permute(0, 3, 1, 2)
        found = self.probabilities(scores)
        loss = self.out((found @ v).transpose(1, 2).flatten(2)).square().sum()
        return (loss, found) if self.returns else (loss,)


class WithDropout(Attention):
    """Attention with dropout goes by PyTorch's spelled-out path on the CPU."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.project(x).chunk(3, dim=-1))
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        return (self.out(found.transpose(1, 2).flatten(2)).square().sum(),)


def stored_pairs(model: nn.Module) -> list[int]:
    """Bytes of what is stored of tensors that have a number for every pair of positions."""
    rows = gact_fx.inspect(model).rows
    return [row.bytes_after for row in rows if row.bytes_after and row.shape[-2:] == (LENGTH, LENGTH)]


def trained(model: nn.Module, x: torch.Tensor, inner: str, **options: Any) -> nn.Module:
    """``model`` after one step at 8 bits."""
    gact_fx.compile(model, budget_bits=8, adaptive=False, inner=inner, **options)
    model(x)[0].backward()
    return model


@BOTH
@INNER
@pytest.mark.parametrize("probabilities", [softmax, divided, causal, capped, in_float])
@pytest.mark.parametrize(("sharpness", "bound"), [(1.0, 0.02), (30.0, 0.1)])
def test_gradients_stay_close_however_sharp(inner: str, probabilities: Change, sharpness: float, bound: float) -> None:
    x = torch.randn(4, LENGTH, WIDTH)
    model = trained(Attention(probabilities, sharpness=sharpness), x, inner)
    reference = Attention(probabilities, sharpness=sharpness)
    reference(x)[0].backward()
    assert relative_error(gradients(model), gradients(reference)) < bound
    assert not stored_pairs(model)
    assert not any("pole" in row.reason for row in gact_fx.inspect(model).rows)


@INNER
def test_autocast(inner: str) -> None:
    x, reference, model = torch.randn(4, LENGTH, WIDTH), Attention(in_float), Attention(in_float)
    with torch.autocast("cpu", torch.bfloat16):
        trained(model, x, inner)
        reference(x)[0].backward()
    assert relative_error(gradients(model), gradients(reference)) < 0.05
    assert not stored_pairs(model)


@BOTH
@pytest.mark.parametrize("inner", ["inductor"])
def test_dropout_is_the_same_when_computed_again(inner: str) -> None:
    """Nothing of the pairs is stored; the gradient is that of the loss that forward computed."""
    x, model = torch.randn(4, LENGTH, WIDTH), WithDropout()
    gact_fx.compile(model, budget_bits=8, adaptive=False, inner=inner)
    model(x)[0].backward()
    assert not stored_pairs(model)
    error = gact_fx.measure_gradient_error(model, [(x,)], lambda model, x: model(*x)[0], draws=4)
    assert error.total.bias < 0.03 * error.total.norm


@pytest.mark.parametrize(
    ("options", "recompute"),
    [
        ({"probabilities": largest_alone}, "auto"),
        ({"returns": True}, "auto"),
        ({"bias": "sequence"}, "auto"),
        ({}, "off"),
    ],
    ids=["decided by the scores", "returned", "with a large bias", "recompute off"],
)
def test_other_probabilities_are_stored(options: dict[str, Any], recompute: str) -> None:
    x = torch.randn(4, LENGTH, WIDTH)
    model = trained(Attention(**options), x, "eager", recompute=recompute)
    reference = Attention(**options)
    reference(x)[0].backward()
    assert relative_error(gradients(model), gradients(reference)) < 0.05
    assert options.get("returns") or stored_pairs(model)


def test_few_positions() -> None:
    """With fewer than query and key have features, the probabilities take less."""
    x = torch.randn(64, 8, WIDTH)
    model = trained(Attention(), x, "eager")
    assert any(row.bytes_after and row.shape[-2:] == (8, 8) for row in gact_fx.inspect(model).rows)


def test_a_bias_of_parameters_is_computed_again() -> None:
    x = torch.randn(4, LENGTH, WIDTH)
    model = trained(Attention(bias="parameter"), x, "eager")
    assert not stored_pairs(model)


def bits_of_heads(**options: Any) -> list[float]:
    """Of query, key and value, from the fewest up."""
    x, model = torch.randn(4, LENGTH, WIDTH), Attention()
    gact_fx.compile(model, inner="eager", sample_batches=[x], loss_fn=lambda model, x: model(x)[0], **options)
    model(x)[0].backward()
    rows = gact_fx.inspect(model).rows
    return sorted(row.bits or 0 for row in rows if {*row.shape[1:]} == {LENGTH, WIDTH // HEADS})


def test_one_width_for_all_is_six_bits_for_query_and_key() -> None:
    assert bits_of_heads(budget_bits=3, adaptive=False) == [3, 6, 6]


@pytest.mark.parametrize(("budget", "least", "most"), [(2, 2, 5), (3, 3, 6), (8, 6, 16)])
def test_query_and_key_get_what_the_budget_has_for_them(budget: float, least: int, most: int) -> None:
    _, *query_and_key = bits_of_heads(budget_bits=budget)
    assert all(least <= bits <= most for bits in query_and_key)
