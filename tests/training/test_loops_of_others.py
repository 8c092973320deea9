"""Loops that train right with torch.compile, whose gradients are those of eager PyTorch here, too."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import gradients, relative_error
from torch import Tensor, nn
from torch.nn import functional as F

import gact_fx
from gact_fx.graphs.recurrent_modules import IS_FOLLOWED
from gact_fx.graphs.tensors import is_foreign

WIDE = 256
Prepare = Callable[[Tensor], Tensor]


class Prepared(nn.Module):
    """Two layers behind what a model makes of its batch first."""

    def __init__(self, prepare: Prepare) -> None:
        super().__init__()
        self.prepare, self.first, self.second = prepare, nn.Linear(WIDE, 128), nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(self.prepare(x))))
        return y


def error(model: nn.Module, oracle: nn.Module) -> float:
    """The worst relative error of a parameter's gradient; gradients are cleared."""
    return max(relative_error([x], [y]) for x, y in zip(gradients(model), gradients(oracle), strict=True))


def numbers(seed: int, dtype: Any = np.float32) -> Any:
    draw = np.random.default_rng(seed)
    # Half of the columns are zero, other ones in every batch.
    found = draw.random((64, WIDE)) * (draw.random((1, WIDE)) > 0.5)
    return (255 * found).astype(dtype) if dtype is np.uint8 else found.astype(dtype)


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("prepare", "dtype"),
    [
        (lambda x: x.float() / 255, np.uint8),
        (lambda x: (x - 0.5) / 0.2, np.float32),
        (lambda x: torch.cat([x, x * 2], -1)[:, :WIDE], np.float32),
        (lambda x: x.view(-1).clamp(0.1, 0.9).view(64, WIDE), np.float32),
        (lambda x: F.one_hot((x * 3.99).long()[:, : WIDE // 4], 4).flatten(1).float(), np.float32),
    ],
)
def test_numpy_may_write_to_the_batch_before_backward(prepare: Prepare, dtype: Any, inner: str) -> None:
    torch.manual_seed(0)
    model = Prepared(prepare)
    oracle = copy.deepcopy(model)
    gact_fx.compile(model, budget_bits=8, inner=inner)
    for step in range(3):
        buffer = numbers(step, dtype)
        batch = torch.from_numpy(buffer)
        expected, loss = oracle(batch.clone()).square().mean(), model(batch).square().mean()
        buffer[:] = numbers(step + 100, dtype)
        expected.backward(), loss.backward()
        assert error(model, oracle) < 0.02


def test_what_backward_reads_anyway_is_not_saved_again() -> None:
    """Tokens are read by the derivative of an embedding, also where they are NumPy's: words are computed again."""
    table, layer = nn.Embedding(1000, 64), nn.Linear(64, 64)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = table, layer

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.layer(self.table(ids) * 2)
            return y

    held = []
    for ids in (
        torch.randint(0, 1000, (32, 64)),
        torch.from_numpy(np.random.default_rng(0).integers(0, 1000, (32, 64))),
    ):
        model = gact_fx.compile(copy.deepcopy(Words()), budget_bits=8, inner="eager")
        for _ in range(2):
            model(ids).square().mean().backward()
        held.append(gact_fx.inspect(model).bytes_after)
    assert held[0] == held[1]


def test_whose_memory_a_tensor_has() -> None:
    own = torch.zeros(8)
    assert not is_foreign(own)
    assert is_foreign(torch.from_numpy(np.zeros(8)))
    assert is_foreign(torch.zeros(8).share_memory_())
    assert not is_foreign(nn.Parameter(own))
    assert not is_foreign(3)
    own.numpy()
    assert is_foreign(own)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDE, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y


@pytest.mark.parametrize("of", ["the model", "a part"])
def test_hooks_may_be_registered_between_steps(of: str) -> None:
    model = Twice()
    oracle = copy.deepcopy(model)
    gact_fx.compile(model, budget_bits=8, inner="eager")
    for step in range(5):
        if step == 3:
            for each in (model, oracle):
                hooked = each if of == "the model" else each.first
                hooked.register_forward_hook(lambda module, inputs, output: 3 * output)
        x = torch.randn(64, WIDE)
        model(x).square().mean().backward(), oracle(x).square().mean().backward()
        assert error(model, oracle) < 0.02


def test_a_method_may_be_compiled() -> None:
    class Decorated(Twice):
        @gact_fx.compile
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDE, 64)

        @gact_fx.compile
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x).tanh()
            return y

    assert isinstance(Layer.forward(Layer(), torch.randn(4, WIDE)), Tensor)
    assert callable(Decorated().forward)
    layer = Layer()
    for _ in range(3):
        x = torch.randn(64, WIDE)
        layer(x).square().sum().backward()
        found = gradients(layer)
        layer.zero_grad()
        layer.layer(x).tanh().square().sum().backward()
        assert max(relative_error([a], [b]) for a, b in zip(found, gradients(layer), strict=True)) < 0.2
        layer.zero_grad()


def test_a_copy_has_a_compiled_method_of_its_own() -> None:
    model = Twice()
    model.forward = gact_fx.compile(model.forward, budget_bits=8, inner="eager")  # type: ignore[method-assign]
    x = torch.randn(64, WIDE)
    model(x).sum().backward()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    model.zero_grad()
    found = other(x)
    assert not found.any()
    found.sum().backward()
    assert other.second.bias.grad is not None
    assert model.second.bias.grad is None


@pytest.mark.skipif(not IS_FOLLOWED, reason="recurrent layers are compiled from torch 2.13 on")
def test_a_recurrent_layer_may_be_replaced() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.out(self.layer(x)[0])
            return y

    model = Recurrent()
    oracle = copy.deepcopy(model)
    gact_fx.compile(model, budget_bits=8, inner="eager")
    for step in range(5):
        if step == 3:
            model.layer = nn.LSTM(32, 64, batch_first=True)
            oracle.layer = copy.deepcopy(model.layer)
        x = torch.randn(8, 20, 32)
        model(x).square().mean().backward(), oracle(x).square().mean().backward()
        assert error(model, oracle) < 0.02


def test_a_loss_without_weight_in_the_first_step_gets_its_bits() -> None:
    """As many as where both losses were there: the noise of its branch is no more than twice that."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(WIDE, 128)
            self.heads = nn.ModuleList(
                nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8)) for _ in range(2)
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.trunk(x).tanh()
            return self.heads[0](y).square().mean(), self.heads[1](y).square().mean()

    noise = []
    for weight in (0.0, 1.0):
        torch.manual_seed(0)
        model = Heads()
        oracle = copy.deepcopy(model)
        gact_fx.compile(model, budget_bits=4, inner="eager")
        errors = []
        for step in range(8):
            x = torch.randn(256, WIDE)
            for each in (model, oracle):
                first, second = each(x)
                (first + (weight if step < 2 else 1.0) * second).backward()
            # The first layer of the second head comes after the trunk's two parameters and the first head's four.
            found, expected = gradients(model)[6:7], gradients(oracle)[6:7]
            errors += [relative_error(found, expected)] if step > 1 else []
        noise.append(sum(errors) / len(errors))
    assert noise[0] < 2 * noise[1]
