"""Ways to run a training step: several passes, parts of backward, modes that change. The oracle is eager autograd."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import relative_error
from torch import nn
from torch.nn import functional as F

import gact_fx

INNER = pytest.mark.parametrize("inner", ["inductor", "eager"])
X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
Step = Callable[[nn.Module], list[torch.Tensor]]


class Net(nn.Module):
    """Three outputs, of which two are also saved; the input may want a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.a(x))
        bent = F.gelu(self.b(hidden))
        return self.c(bent), hidden, bent.exp()


class Written(Net):
    """In-place operators on activations, on a part of one, and on a copy of the input."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = self.a(x).tanh_()
        bent = F.gelu(self.b(hidden).mul_(2).add_(1))
        bent[:, :8] = hidden[:, :8] * 2
        bent[::2] *= 3
        x = x.clone()
        x.add_(1)
        return self.c(F.relu(bent, inplace=True)) + x[:, :8], hidden, bent


class Shared(Net):
    """One module four times over, and one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.c

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.a(x))
        for _ in range(4):
            hidden = hidden + F.gelu(self.b(hidden))
        return self.c(hidden) + self.again(hidden.sin()), hidden, hidden


def gradients_of(model: nn.Module, *losses: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    model.zero_grad()
    for loss in losses:
        loss.backward(**options)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def loss_of(model: nn.Module, scale: float = 1.0) -> torch.Tensor:
    loss: torch.Tensor = model(X * scale)[0].square().sum()
    return loss


def plain(model: nn.Module) -> list[torch.Tensor]:
    return gradients_of(model, loss_of(model))


def several_forwards(model: nn.Module) -> list[torch.Tensor]:
    losses = [loss_of(model, scale) for scale in (1, 0.5, 2)]
    return gradients_of(model, losses[0] + losses[1] * losses[2])


def accumulated(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    for scale in (1, 0.5, 2):
        loss_of(model, scale).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def retained(model: nn.Module) -> list[torch.Tensor]:
    loss = loss_of(model)
    first = gradients_of(model, loss, retain_graph=True)
    second = gradients_of(model, loss)
    # What is rounded is rounded once.
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return second


def one_output(model: nn.Module) -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(X)[1].square().sum(), list(model.parameters())[:2]))


def two_outputs(model: nn.Module) -> list[torch.Tensor]:
    outputs = model(X)
    return list(torch.autograd.grad((outputs[1] * 2).sum() + outputs[0].square().sum(), list(model.parameters())))


def some_parameters(model: nn.Module) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss_of(model), [list(model.parameters())[2]]))


def of_the_input(model: nn.Module) -> list[torch.Tensor]:
    x = X.clone().requires_grad_()
    return [*gradients_of(model, model(x)[0].square().sum()), x.grad]  # type: ignore[list-item]


def of_an_activation(model: nn.Module) -> list[torch.Tensor]:
    x = X.clone().requires_grad_()
    return list(torch.autograd.grad(model(x * 2)[0].square().sum(), [x]))


def modes(model: nn.Module) -> list[torch.Tensor]:
    model.eval()
    with torch.no_grad():
        exact = model(X)[0]
    with torch.inference_mode():
        torch.testing.assert_close(model(X)[0], exact)
    found = plain(model)
    model.train()
    return found + plain(model)


STEPS: list[tuple[type[nn.Module], Step]] = [
    *((kind, plain) for kind in (Written, Shared)),
    *((Net, step) for step in (several_forwards, accumulated, retained, one_output, two_outputs, some_parameters)),
    *((Net, step) for step in (of_the_input, of_an_activation, modes)),
]


@pytest.mark.parametrize(("kind", "step"), STEPS, ids=lambda x: x.__name__.lower())
def test_a_step(kind: type[nn.Module], step: Step) -> None:
    """While it is profiled, and twice under the plan."""
    model = kind()
    reference = copy.deepcopy(model)
    gact_fx.compile(model, budget_bits=8, min_elements=64, inner="eager")
    for _ in range(3):
        assert relative_error(step(model), step(reference)) < 0.02
    assert any(row.encoding == "quantize" for row in gact_fx.inspect(model).rows)


@INNER
def test_backward_twice_after_steps_that_ran_it_once(inner: str) -> None:
    """torch.compile, whose backward may overwrite what was saved, refuses that."""
    model = Net()
    reference = copy.deepcopy(model)
    gact_fx.compile(model, budget_bits=8, min_elements=64, inner=inner)
    for step in (plain, plain, retained, plain):
        assert relative_error(step(model), step(reference)) < 0.02


def test_parameters_that_thaw() -> None:
    model = Net()
    model.a.requires_grad_(False)
    model.b.requires_grad_(False)
    reference = copy.deepcopy(model)
    gact_fx.compile(model, budget_bits=8, min_elements=64, inner="eager")
    for step in range(4):
        if step == 2:
            model.b.requires_grad_(True)
            reference.b.requires_grad_(True)
        assert relative_error(plain(model), plain(reference)) < 0.02


@INNER
def test_double_backward_names_the_way_out(inner: str) -> None:
    model = Net()
    reference = copy.deepcopy(model)
    gact_fx.compile(model, budget_bits=8, min_elements=64, inner=inner)

    def penalty(model: nn.Module) -> torch.Tensor:
        x = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(model) + model(x)[0].sum(), x, create_graph=True)
        return gradient.square().sum()

    for _ in range(2):
        plain(model)
        # A gradient that is not differentiated is no error.
        loss = penalty(model)
        with pytest.raises(RuntimeError, match=r'^gact_fx: .*double backward.*set_stance\("force_eager"\)'):
            loss.backward()
    with torch.compiler.set_stance("force_eager"):
        found = gradients_of(model, penalty(model))
    torch.testing.assert_close(found, gradients_of(reference, penalty(reference)))
    assert relative_error(plain(model), plain(reference)) < 0.02


def test_double_backward_behind_a_view() -> None:
    """Outputs that are views of one another come with nodes of autograd's own."""
    weight = nn.Parameter(torch.randn(32, 32))
    x = X.clone().requires_grad_()

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(x @ weight)
        return y.view(-1), y.t()

    compiled = gact_fx.compile(function, inner="eager", min_elements=64)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(compiled(x)[1].sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="gact_fx: the gradients of a compiled model"):
            gradient.sum().backward()
