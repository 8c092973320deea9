"""Models with nn.LSTM, nn.GRU and nn.RNN, which torch.compile by itself leaves to eager PyTorch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from activation_bytes import activation_bytes
from conftest import gradients, relative_error
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gact_fx
from gact_fx.graphs import recurrent_modules

pytestmark = pytest.mark.skipif(
    not recurrent_modules.IS_FOLLOWED, reason="before torch 2.13 recurrent layers are left to eager PyTorch"
)
KINDS = pytest.mark.parametrize(
    "kind", [nn.LSTM, *(pytest.param(each, marks=pytest.mark.slow) for each in (nn.GRU, nn.RNN))]
)
# How many times fewer bytes at 8 bits than in eager PyTorch, whose RNN has one gate.
LEAST = {nn.LSTM: 25, nn.GRU: 8, nn.RNN: 3}
ROWS, STEPS, WIDTH = 8, 40, 64
LENGTHS = torch.tensor([40, 39, 9, 40, 21, 1, 21, 30])


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(16, WIDTH), kind(WIDTH, WIDTH, 2, batch_first=True, **options)  # type: ignore[arg-type]
        self.last = nn.Linear(WIDTH * (2 if self.rnn.bidirectional else 1), 8)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = torch.tanh(self.first(x))
        if lengths is None:
            y = self.rnn(x)[0]
        else:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            y = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]
        return self.last(y).square().mean()


class Padded(nn.LSTM):
    """One whose forward pass is the user's."""

    def forward(self, x: Tensor, state: Any = None) -> Any:  # type: ignore[override]
        return super().forward(x * 1.0, state)


def batch(steps: int = STEPS) -> Tensor:
    return torch.randn(ROWS, steps, 16)


def held(model: nn.Module, *given: Tensor) -> int:
    return activation_bytes(model(*given), exclude=[*model.parameters(), *given])


def trained(model: nn.Module, *given: Tensor, steps: int = 3) -> list[Tensor]:
    """The gradients of the last step."""
    for _ in range(steps):
        model.zero_grad()
        model(*given).backward()
    return gradients(model)


@KINDS
@pytest.mark.parametrize("inner", ["inductor", "eager"])
def test_few_bytes_are_held_and_gradients_are_right(kind: type[nn.RNNBase], inner: str) -> None:
    exact, x = Tagger(kind), batch()
    model = gact_fx.compile(copy.deepcopy(exact), budget_bits=8, inner=inner, fullgraph=True)
    assert 1e-6 < relative_error(trained(model, x), trained(exact, x)) < 0.01
    assert held(model, x) * LEAST[kind] < held(exact, x)
    assert float(model(x)) == pytest.approx(float(exact(x)), rel=1e-5)


@KINDS
def test_packed_sequences(kind: type[nn.RNNBase]) -> None:
    exact, given = Tagger(kind, bidirectional=True), (batch(), LENGTHS)
    model = gact_fx.compile(copy.deepcopy(exact), budget_bits=8, inner="eager")
    assert relative_error(trained(model, *given), trained(exact, *given)) < 0.01
    assert held(model, *given) * LEAST[kind] / 2 < held(exact, *given)
    # Other lengths, on the same graphs.
    given = batch(), LENGTHS.clamp(max=30)
    assert relative_error(trained(model, *given), trained(exact, *given)) < 0.01


def test_lengths_that_vary_compile_nothing_anew() -> None:
    exact = Tagger(nn.GRU)
    model = gact_fx.compile(copy.deepcopy(exact), budget_bits=8, inner="eager")
    for steps in (40, 40, 50, 45):
        trained(model, batch(steps), steps=1)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for steps in (77, 52, 64):
        x = batch(steps)
        assert relative_error(trained(model, x, steps=1), trained(exact, x, steps=1)) < 0.01
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@KINDS
def test_autocast_casts_as_it_casts_those_of_pytorch(kind: type[nn.RNNBase]) -> None:
    exact, x = Tagger(kind), batch()
    ours = copy.deepcopy(exact)
    recurrent_modules.install([ours.rnn])
    for given in (x, torch.tanh(exact.first(x)).bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            given = exact.first(given) if given is x else given
            found, wanted = ours.rnn(given), exact.rnn(given)
        assert found[0].dtype == wanted[0].dtype
        torch.testing.assert_close(found[0].float(), wanted[0].float(), atol=0.02, rtol=0)
    model = gact_fx.compile(copy.deepcopy(exact), budget_bits=8, inner="eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(trained(model, x), trained(exact, x)) < 0.02


def test_dropout_between_layers_is_drawn_in_training_alone() -> None:
    model, x = gact_fx.compile(Tagger(nn.LSTM, dropout=0.5), budget_bits=8, inner="eager"), batch()
    trained(model, x)
    assert float(model(x)) != float(model(x))
    model.eval()
    assert float(model(x)) == float(model(x))


def test_without_compression_modules_are_left_alone() -> None:
    exact, x = Tagger(nn.LSTM), batch()
    model = gact_fx.compile(copy.deepcopy(exact), budget_bits=None, inner="eager")
    assert relative_error(trained(model, x), trained(exact, x)) < 1e-6 and "forward" not in vars(model.rnn)


def test_uncompile_leaves_nothing_behind() -> None:
    model, x = Tagger(nn.LSTM), batch()
    before = dict(vars(model.rnn))
    gact_fx.compile(model, inner="eager")
    trained(model, x)
    assert "forward" in vars(model.rnn)
    assert vars(gact_fx.uncompile(model).rnn).keys() == before.keys()
    function = gact_fx.compile(lambda x: model(x), inner="eager")
    assert "forward" in vars(model.rnn)
    gact_fx.uncompile(function)
    assert vars(model.rnn).keys() == before.keys()


@pytest.mark.parametrize(
    "duplicate",
    [pytest.param(copy.deepcopy, marks=pytest.mark.slow), lambda model: pickle.loads(pickle.dumps(model))],
)
def test_copies_run_and_can_be_compiled(duplicate: Any) -> None:
    model, x = gact_fx.compile(Tagger(nn.LSTM), budget_bits=8, inner="eager"), batch()
    trained(model, x)
    other = duplicate(model)
    assert other.rnn.forward.__self__ is other.rnn
    torch.testing.assert_close(other(x), model(x))
    exact = held(other, x)
    trained(gact_fx.compile(other, budget_bits=8, inner="eager"), x)
    assert held(other, x) * 3 < exact


def test_a_forward_pass_of_the_users_stays_in_eager_pytorch() -> None:
    exact, x = Tagger(Padded), batch()
    model = gact_fx.compile(copy.deepcopy(exact), budget_bits=8, inner="eager")
    assert relative_error(trained(model, x), trained(exact, x)) < 0.01
    text = str(gact_fx.inspect(model))
    assert "does not round uint8" in text and "torch 2.13 with nn.LSTM itself" in text


def test_exported_programs_know_nothing_of_gact_fx() -> None:
    model, x = gact_fx.compile(Tagger(nn.LSTM), inner="eager"), batch()
    trained(model, x)
    program = torch.export.export(model, (x,), strict=False)
    assert not any("gact_fx" in str(node.target) for node in program.graph.nodes)


def test_an_estimate_and_the_gradients_error() -> None:
    model, x = Tagger(nn.LSTM), batch()
    found = gact_fx.estimate(model, (x,), budget_bits=8, inner="eager")
    gact_fx.compile(model, budget_bits=8, inner="eager")
    trained(model, x)
    assert found.held == pytest.approx(held(model, x), rel=0.05)
    total = gact_fx.measure_gradient_error(model, [(x,), (batch(),)]).total
    assert 0 < total.variance**0.5 < 0.01 * total.norm and not total.is_biased
