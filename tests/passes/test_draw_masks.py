"""Dropout's masks are drawn by the library, and are those of torch.compile."""

import sys
from typing import Any

import pytest
import torch
from conftest import relative_error
from torch import nn
from torch.nn import functional as F

import gact_fx
from gact_fx.codec import operators

module = sys.modules["gact_fx.passes.draw_masks"]  # the package has the function by that name
WIDTH = 64
pytestmark = pytest.mark.skipif(bool(operators.WHY_NOT_LOADED), reason=operators.WHY_NOT_LOADED)


class Dropping(nn.Module):
    """Dropout of several kinds between layers, one whose mask is not all that its numbers are for, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.gelu(self.first(x)), 0.3)
        x = F.alpha_dropout(F.dropout(self.second(x), 0.1), 0.2)
        numbers = torch.rand_like(x)
        x = x * (numbers > 0.25) * (1 + numbers)
        return (x * F.dropout(torch.ones(WIDTH), 0.5)).square().mean()


def steps(model: Any, x: torch.Tensor, amp: bool) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.both_compilers
@pytest.mark.parametrize("inner", ["inductor"])
@pytest.mark.parametrize("amp", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_same_elements_are_dropped(inner: str, amp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = Dropping(), torch.compile(Dropping())
    drawn: list[float] = []
    add_call = module.add_call

    def counted(graph: Any, target: Any, args: Any, name: str) -> Any:
        drawn.append(args[2])
        return add_call(graph, target, args, name)

    monkeypatch.setattr(module, "add_call", counted)
    gact_fx.compile(model, budget_bits=8, inner=inner)
    steps(model, torch.randn(80, WIDTH), amp)  # is recorded, operator by operator
    for rows in (80, 96):
        x = torch.randn(rows, WIDTH)
        found, expected = (steps(each, x, amp) for each in (model, reference))
        torch.testing.assert_close(found[0], expected[0], rtol=1e-2 if amp else 1e-5, atol=0)
        assert relative_error(found[1:], expected[1:]) < 0.03
    assert any(abs(threshold - 0.3) < 0.01 for threshold in drawn), "the library drew a mask"
