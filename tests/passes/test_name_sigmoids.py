"""SiLU and what is like it come as products with a sigmoid, and nothing overflows on the way."""

import copy

import pytest
import torch
from conftest import gradients, relative_error
from torch import nn
from torch.nn import functional as F

import gact_fx
from gact_fx.training.model import session_of


class Gated(nn.Module):
    """SiLU of numbers of which some have an infinite exponential, and a gate spelled by hand."""

    def __init__(self, *, spells: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 8)
        self.scale, self.spells = nn.Parameter(torch.full((64,), 100.0)), spells

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.scale * self.first(x))
        if self.spells:
            hidden = hidden / (1 + torch.exp(-self.second(0.01 * hidden)))
        return self.third(hidden).square().mean()


@pytest.mark.parametrize("spells", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_eager(dtype: torch.dtype, spells: bool) -> None:
    exact = Gated(spells=spells).to(dtype)
    model, x = copy.deepcopy(exact), torch.randn(256, 32).to(dtype)
    exact(x).backward()
    # The first step runs operator by operator.
    gact_fx.compile(model, budget_bits=8, min_elements=64)
    model(x).backward()
    assert relative_error(gradients(model), gradients(exact)) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_overflows_on_the_way(dtype: torch.dtype) -> None:
    """So that the first step has codes of what a SiLU reads, and not the exact numbers."""
    model = gact_fx.compile(Gated(spells=False).to(dtype), budget_bits=8, min_elements=64)
    model(torch.randn(256, 32).to(dtype)).backward()
    session = session_of(model)
    assert session is not None
    session.settle()
    tensors = [how for profile in session.profiles.values() for _, how in profile.analysis.quantized()]
    assert any(how.bends for how in tensors)
    assert all(how.is_tame for how in tensors if how.bends)
