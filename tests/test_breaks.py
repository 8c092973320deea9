"""Operators that run in eager PyTorch between the compiled graphs of one model."""

import logging

import pytest
import torch
from torch import nn

import gact_fx

X = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))


@torch.compiler.disable
def times_ten(h: torch.Tensor) -> torch.Tensor:
    return h * 10


@torch.compiler.disable
def times_ten_in_place(h: torch.Tensor) -> torch.Tensor:
    return h.mul_(10)


@torch.compiler.disable
def nothing(h: torch.Tensor) -> torch.Tensor:
    return h.view_as(h)


class Net(nn.Module):
    def __init__(self, between: object) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(64, 64), nn.Linear(64, 64), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.between(torch.tanh(self.a(x)) * 2)  # type: ignore[operator]
        loss: torch.Tensor = torch.tanh(self.b(h) / 10).square().sum()
        return loss


def flows(between: object) -> int:
    """Gradients that were followed from one graph to an earlier one."""
    found: list[int] = []
    measure = gact_fx.session.Session.measure

    class Watched(gact_fx.session.Session):
        def measure(self, steps):  # type: ignore[no-untyped-def]
            found.append(sum(len(step.flows) for step in steps))
            return measure(self, steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gact_fx.api.Session", Watched)
        gact_fx.compile(Net(between), inner="eager", min_elements=64, sample_batches=[X])
    return found[0]


@pytest.mark.parametrize("between", [times_ten, times_ten_in_place])
def test_a_gradient_is_not_followed_through_an_eager_operator(
    between: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether its result lies elsewhere or in its input's place; the warning names it."""
    with caplog.at_level(logging.WARNING, "gact_fx"):
        assert flows(between) == 0
    assert "graph 1 reads the (256, 64) result of MulBackward0" in caplog.text


def test_a_gradient_is_followed_where_nothing_is_computed_between(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gact_fx"):
        assert flows(nothing) == 1
    assert "reads the" not in caplog.text


def test_a_detached_activation_ends_the_gradient() -> None:
    """What is made a leaf of its own between graphs has no gradient to pass on, though it keeps its address."""

    @torch.compiler.disable
    def cut(h: torch.Tensor) -> torch.Tensor:
        return h.detach().requires_grad_()

    assert flows(cut) == 0
