"""Recurrent layers that backward computes again, against PyTorch's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from gact_fx.graphs import recurrent_layer, recurrent_modules

operator = torch.ops.gact_fx.recurrent_layer.default
ROWS, FEATURES, WIDTH, STEPS = 3, 6, 8, 19
LENGTHS = [19, 11, 1]
LAYERS: dict[str, Any] = {
    "lstm": lambda **options: nn.LSTM(FEATURES, WIDTH, **options),
    "lstm with projections": lambda **options: nn.LSTM(FEATURES, WIDTH, proj_size=5, **options),
    "gru": lambda **options: nn.GRU(FEATURES, WIDTH, **options),
    "tanh": lambda **options: nn.RNN(FEATURES, WIDTH, **options),
    "relu": lambda **options: nn.RNN(FEATURES, WIDTH, nonlinearity="relu", **options),
}
FORMS: dict[str, dict[str, bool | int]] = {
    "plain": {},
    "deep, both ways, batch first": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "without biases": {"bias": False, "bidirectional": True},
}


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several, the last one shorter."""
    monkeypatch.setattr(recurrent_layer, "SPAN", 8)


def states(module: nn.RNNBase) -> Any:
    count = module.num_layers * (2 if module.bidirectional else 1)
    h = torch.randn(count, ROWS, module.proj_size or WIDTH, dtype=torch.float64, requires_grad=True)
    cells = torch.randn(count, ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    return (h, cells) if isinstance(module, nn.LSTM) else h


def tensors(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


def run(module: nn.RNNBase, x: Tensor, state: Any, is_packed: bool) -> list[Tensor]:
    """All results, and the gradients of something that reads each."""
    given: Any = x
    if is_packed:
        given = pack_padded_sequence(x, LENGTHS, batch_first=module.batch_first)
    y, last = module(given) if state is None else module(given, state)
    results = [y.data if is_packed else y, *tensors(last)]
    loss = sum((result * torch.linspace(-1, 2, result.numel()).view_as(result)).sum() for result in results)
    leaves = [x, *(tensors(state) if state is not None else []), *module.parameters()]
    return [*results, *torch.autograd.grad(loss, leaves)]


@pytest.mark.skipif(not recurrent_modules.IS_FOLLOWED, reason="modules take the operator from torch 2.13 on")
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("has_state", [False, True], ids=["from zero", "from a state"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", LAYERS)
def test_results_and_gradients_are_those_of_pytorch(kind: str, form: str, has_state: bool, is_packed: bool) -> None:
    own = LAYERS[kind](**FORMS[form]).double()
    ours = copy.deepcopy(own)
    recurrent_modules.install([ours])
    assert recurrent_modules.can_trace([ours]) and not recurrent_modules.can_trace([own, ours])
    shape = (ROWS, STEPS, FEATURES) if own.batch_first else (STEPS, ROWS, FEATURES)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    state = states(own) if has_state else None
    for found, exact in zip(run(ours, x, state, is_packed), run(own, x, state, is_packed), strict=True):
        torch.testing.assert_close(found, exact)
    recurrent_modules.remove([ours])
    assert vars(ours).keys() == vars(own).keys()


def arguments(mode: str, reverse: bool) -> list[Any]:
    gates = {"lstm": 4, "gru": 3}.get(mode, 1)
    shapes = [(STEPS, 2, 3), (2, 4), (2, 4), (gates * 4, 3), (gates * 4, 4), (gates * 4,), (gates * 4,)]
    given: list[Any] = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    given[2] = given[2] if mode == "lstm" else None
    return [*given, None, None, mode, reverse]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh"])
def test_what_compilers_are_told_is_so(mode: str, reverse: bool) -> None:
    torch.library.opcheck(operator, tuple(arguments(mode, reverse)))


@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh"])
def test_the_differentiable_backward_is_the_backward_and_has_its_derivative(mode: str) -> None:
    x, h, c, *rest = arguments(mode, True)
    y, last_h, last_c, *starts = operator(x, h, c, *rest)
    given = [torch.randn_like(value) for value in (y, last_h, last_c)]
    given += [x.detach(), *(start.detach() for start in starts)]
    weights = [None if w is None else w.detach() for w in rest[:5]]
    exact = torch.ops.gact_fx.recurrent_layer_backward(*given, *weights, *rest[5:])
    leaves = [value.requires_grad_() for value in given if value.numel()]

    def backward(*values: Tensor) -> tuple[Tensor, ...]:
        there = iter(values)
        filled = [next(there) if value.numel() else value for value in given]
        found = recurrent_layer.differentiable_backward(*filled, *weights, *rest[5:])
        return tuple(gradient for gradient in found if gradient.numel())

    for a, b in zip(backward(*leaves), [gradient for gradient in exact if gradient.numel()], strict=True):
        torch.testing.assert_close(a, b)
    assert torch.autograd.gradcheck(backward, leaves, fast_mode=True)
