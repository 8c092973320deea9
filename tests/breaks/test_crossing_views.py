"""Views of one activation that cross a graph break: other shapes, other orders in memory, other parts, turned signs.

All of these once gave gradients of the wrong elements.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from activation_bytes import activation_bytes
from conftest import gradients, relative_error
from test_crossings import Layer, RunByEager
from torch import nn

import gact_fx

IMAGES = torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(1))
INNER = pytest.mark.parametrize("inner", ["inductor", "eager"])
See = Callable[[torch.Tensor], torch.Tensor]


class Seen(nn.Module):
    """Layers behind graph breaks that see one activation each in its own way, inside of their graphs or before them."""

    def __init__(self, encoder: nn.Module, layers: Sequence[tuple[nn.Module, See]], *, inside: bool = False) -> None:
        super().__init__()
        self.encoder = encoder
        self.layers = nn.ModuleList(layer if not inside else _Seeing(layer, see) for layer, see in layers)
        self.sees = [see if not inside else _as_it_is for _, see in layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activation = self.encoder(x)
        total = torch.zeros(())
        for layer, see in zip(self.layers, self.sees, strict=True):
            seen = _by_eager(see, activation)
            torch._dynamo.graph_break()
            total = total + layer(seen).square().mean()
        return total


class _Seeing(nn.Module):
    def __init__(self, layer: nn.Module, see: See) -> None:
        super().__init__()
        self.layer, self.see = layer, see

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.see(x))


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


@torch.compiler.disable
def _by_eager(see: See, x: torch.Tensor) -> torch.Tensor:
    return see(x)


def view(*shape: int) -> See:
    return lambda x: x.view(shape)


def conv(channels: int, seen: See, kind: type[Layer] = Layer) -> tuple[nn.Module, See]:
    return kind(nn.Conv2d(channels, 4, 3), torch.tanh), seen


def linear(width: int, seen: See, kind: type[Layer] = Layer) -> tuple[nn.Module, See]:
    return kind(nn.Linear(width, 4), torch.tanh), seen


def channels_last_of_one() -> See:
    return lambda x: x.permute(0, 3, 1, 2)


def error_of(model: nn.Module, batch: torch.Tensor, inner: str) -> float:
    reference = copy.deepcopy(model)
    reference(batch).backward()
    ours = gact_fx.compile(model, inner=inner, budget_bits=8, min_elements=64, adaptive=False)
    for _ in range(3):
        ours.zero_grad()
        ours(batch).backward()
    worst = 0.0
    for found, exact in zip(gradients(ours), gradients(reference), strict=True):
        worst = max(worst, relative_error([found], [exact]) if float(exact.norm()) > 1e-3 else 0.0)
    return worst


CASES = {
    "one shape and another": [conv(8, view(4, 8, 16, 16)), conv(4, view(8, 4, 16, 16))],
    "another shape first": [conv(4, view(8, 4, 16, 16)), conv(8, view(4, 8, 16, 16))],
    "both of another rank": [conv(4, view(8, 4, 16, 16)), linear(256, view(32, 256))],
    "a convolution in eager PyTorch": [conv(8, view(4, 8, 16, 16)), conv(4, view(8, 4, 16, 16), RunByEager)],
    "a flat view in eager PyTorch": [conv(8, view(4, 8, 16, 16)), linear(256, view(32, 256), RunByEager)],
    "a flat view in eager PyTorch first": [linear(256, view(32, 256), RunByEager), conv(8, view(4, 8, 16, 16))],
}


@pytest.mark.slow
@INNER
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("inside", [False, True])
def test_views_of_other_shapes(case: str, inside: bool, inner: str) -> None:
    model = Seen(Layer(nn.Linear(16, 16), torch.sin), copy.deepcopy(CASES[case]), inside=inside)
    assert error_of(model, IMAGES, inner) < 0.03


@INNER
def test_frames_of_videos(inner: str) -> None:
    layers = [conv(4, view(16, 4, 16, 16)), conv(4, view(16, 4, 16, 16))]
    model = Seen(Layer(nn.Conv3d(3, 8, 3, padding=1), torch.sin), layers, inside=True)
    assert error_of(model, torch.randn(2, 3, 4, 16, 16), inner) < 0.03


@INNER
@pytest.mark.parametrize("kind", [Layer, RunByEager])
def test_channels_last_of_one_channel(inner: str, kind: type[Layer]) -> None:
    """Contiguous, though its strides are in another order than its dimensions."""
    layers = [conv(1, channels_last_of_one()), linear(256, view(8, 256), kind), conv(1, channels_last_of_one())]
    model = Seen(Layer(nn.Linear(1, 1), lambda x: torch.sin(3 * x)), layers, inside=True)
    assert error_of(model, torch.randn(8, 16, 16, 1), inner) < 0.03


class Parts(nn.Module):
    """Returns one part of its result, and saves another: which parts, varies."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(64, 64), nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor, first: int, second: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return torch.narrow(y, 0, first, 64), torch.narrow(y, 0, second, 64) * self.weight


class ReadsParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts, self.one, self.other = Parts(), Layer(nn.Linear(64, 64)), Layer(nn.Linear(64, 64), torch.tanh)

    def forward(self, x: torch.Tensor, first: int, second: int) -> torch.Tensor:
        torch._dynamo.graph_break()
        a, b = self.parts(x, first, second)
        torch._dynamo.graph_break()
        c = self.one(a)
        torch._dynamo.graph_break()
        return b.square().mean() + c.square().mean() + self.other(a).mean()


def test_parts_that_are_the_same_by_chance_when_traced() -> None:
    model = ReadsParts()
    ours = gact_fx.compile(copy.deepcopy(model), inner="eager", budget_bits=8, min_elements=64, dynamic=True)
    for first, second in ((64, 64), (64, 64), (64, 64), (64, 128), (128, 200)):
        x = torch.randn(300, 64)
        model(x, first, second).backward()
        ours(x, first, second).backward()
        assert relative_error(gradients(ours), gradients(model)) < 0.02


class Conjugated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Layer(nn.Linear(64, 64), torch.sin)
        self.weights = nn.ParameterList(torch.randn(64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.product(y)

    @torch.compiler.disable
    def product(self, y: torch.Tensor) -> torch.Tensor:
        z = torch.complex(y, y.cos())
        turned = z.conj().imag
        assert turned.is_neg() and turned.data_ptr() == z.imag.data_ptr()
        return (z.imag * self.weights[0]).square().mean() + (turned * self.weights[1]).sin().mean()


def test_the_imaginary_part_of_a_conjugate_is_another_tensor() -> None:
    assert error_of(Conjugated(), torch.randn(128, 64), "eager") < 0.02


# ---- Figures ----------------------------------------------------------------------------------------------------


@INNER
def test_the_report_counts_what_a_convolution_and_a_linear_layer_store(inner: str) -> None:
    layers = [conv(8, _as_it_is), linear(16, view(512, 16)), conv(8, _as_it_is)]
    model = Seen(Layer(nn.Linear(16, 16), torch.sin), layers, inside=True)
    ours = gact_fx.compile(model, inner=inner, budget_bits=4, min_elements=64)
    for _ in range(3):
        loss = ours(IMAGES)
        held = activation_bytes(loss, exclude=[*ours.parameters(), IMAGES])
        loss.backward()
    report = gact_fx.inspect(ours)
    small = 8 * len(layers)  # the losses' own scalars
    assert abs(held - report.bytes_after) <= small


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, state: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return torch.tanh(state + self.linear(memory))


@pytest.mark.parametrize("budget", [{"budget_bits": 4.0}, {"budget_bytes": 60_000}])
def test_several_calls_of_a_model_keep_to_the_budget(budget: dict[str, Any]) -> None:
    """The budget is that of the step, whatever many forward passes it has."""
    encoder, cell, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), Cell(), torch.randn(256, 64)
    ours = gact_fx.compile(cell, inner="eager", min_elements=64, **budget)
    for _ in range(3):
        memory, state = encoder(x), torch.zeros(1)
        for _ in range(4):
            state = ours(state, memory)
        state.square().mean().backward()
    report = gact_fx.inspect(ours)
    assert report.average_bits is not None and report.average_bits <= budget.get("budget_bits", 8)
    assert report.bytes_after <= budget.get("budget_bytes", 1e9)
