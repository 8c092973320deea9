"""Profiling on sample batches leaves the model, and whatever else the loss reaches, as it was."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gact_fx
from gact_fx.training.unchanged import modules_of

X = torch.randn(64, 16)
OPTIONS: dict[str, Any] = {"inner": "eager", "min_elements": 64}
GLOBAL = nn.BatchNorm1d(16)
GLOBALS = {"bn": GLOBAL}


class Net(nn.Module):
    """A buffer that forward puts another tensor in the place of, and one that it changes."""

    run: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)
        self.register_buffer("run", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bn(self.a(x))
        self.run = 0.9 * self.run + 0.1 * h.detach().abs().mean()
        return self.b(torch.tanh(h)).square().mean()


def state(model: nn.Module) -> tuple[dict[str, torch.Tensor], list[bool]]:
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return values, [module.training for module in model.modules()]


def assert_same(model: nn.Module, before: tuple[dict[str, torch.Tensor], list[bool]]) -> None:
    after = state(model)
    assert after[1] == before[1]
    assert all(torch.equal(after[0][name], value) for name, value in before[0].items())


@pytest.mark.parametrize("fails", [False, True])
def test_buffers_and_modes(fails: bool) -> None:
    model = Net()
    model.bn.eval()
    before, buffers = state(model), dict(model.named_buffers())

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model.train()
        loss: torch.Tensor = model(batch + 1)
        model.eval()
        if fails:
            raise RuntimeError("after the forward pass")
        return loss

    try:
        gact_fx.compile(model, sample_batches=[X], loss_fn=loss_fn, **OPTIONS)
    except ValueError:
        assert fails
    assert_same(model, before)
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())


class Trainer:
    def __init__(self) -> None:
        self.model = Net()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x + 1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(x)


@pytest.mark.parametrize("form", ["method", "object", "partial", "closure"])
def test_modules_behind_a_function(form: str) -> None:
    trainer = Trainer()
    models = [trainer.model]
    forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "method": trainer.step,
        "object": trainer,
        "partial": functools.partial(lambda model, x: model(x + 1), trainer.model),
        "closure": lambda x: models[0](x + 1),
    }
    before = state(trainer.model)
    gact_fx.compile(forms[form], sample_batches=[X], **OPTIONS)
    assert_same(trainer.model, before)


def test_where_modules_are_looked_for() -> None:
    a, b, c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    pair, named = (a, 1), {"b": b}

    def plain(x: torch.Tensor) -> object:
        return pair, named, c, GLOBALS

    assert modules_of(a) == [a]
    assert set(modules_of(plain)) == {a, b, c, GLOBAL}
    assert modules_of(functools.partial(functools.partial(max, a), key=[b])) == [a, b]
    assert modules_of(torch.sin) == [] and modules_of(a.forward)[0] is a
