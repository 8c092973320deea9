"""Of a gradient that is taken apart, what waits across the peak is a copy of its part."""

import sys

import pytest
import torch
from conftest import gradients, relative_error
from peak_bytes import peak_bytes
from torch import nn

import gact_fx

BEHIND = torch.ops.gact_fx.behind.default
ROWS, WIDTH = 4096, 128


class Concatenated(nn.Module):
    """Two wide layers; what went into them is concatenated with what came out of them."""

    def __init__(self, *, is_joined: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, WIDTH), nn.Linear((1 + is_joined) * WIDTH, 16)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh())
        self.is_joined = is_joined

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.inner(x)
        return self.last(torch.cat([y, x], 1) if self.is_joined else x + y).square().mean()


def planned(model: nn.Module, x: torch.Tensor, inner: str) -> int:
    """Bytes of the peak of a planned step."""
    gact_fx.compile(model, budget_bits=8, inner=inner)
    for _ in range(2):
        model.zero_grad()
        model(x).backward()
    model.zero_grad()
    return peak_bytes(lambda: model(x)).step


def copies(model: nn.Module) -> int:
    graph = gact_fx.inspect(model).graphs[0].backward.graph
    return sum(node.name.endswith("_part") for node in graph.find_nodes(op="call_function", target=BEHIND))


def test_the_other_part_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    x, model, reference = torch.randn(ROWS, 16), Concatenated(), Concatenated()
    found = planned(model, x, "inductor")
    assert copies(model) == 1
    model.zero_grad()
    reference(x).backward()
    model(x).backward()
    assert relative_error(gradients(model), gradients(reference)) < 0.01
    monkeypatch.setattr(sys.modules["gact_fx.passes.keep_parts"], "_SHARE", 0)
    other = Concatenated()
    assert planned(other, x, "inductor") - found > 0.8 * ROWS * WIDTH * 4
    assert copies(other) == 0


def test_what_waits_as_a_whole_is_not_copied() -> None:
    model = Concatenated(is_joined=False)
    planned(model, torch.randn(ROWS, 16), "inductor")
    assert copies(model) == 0
