"""Codes with groups within channels: who gets them, what they gain, and that views and other sizes read them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import gradients
from torch import Tensor, nn
from torch.nn import functional as F

import gact_fx
from gact_fx.diagnostics.plan_text import plan_text
from gact_fx.diagnostics.report_rows import Row

WIDTH = 128


class SticksOut(nn.Module):
    """What the second layer reads has a few channels that are much larger than the others."""

    def __init__(self, gain: float = 40.0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 8)
        self.a.weight.data[::17] *= gain

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).square().mean()


class Sums(SticksOut):
    """Beside the second layer, operators read it that care how it lies in memory: a pointwise one and a flat view."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h).square().mean() + 0.01 * (h.flatten() ** 3).mean() / 40


class Views(SticksOut):
    """Backward reads the same memory as heads, too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        heads = h.view(-1, 4, WIDTH // 4).transpose(0, 1)
        return self.b(h).square().mean() + (heads @ heads.transpose(1, 2)).square().mean() / WIDTH


def batch(rows: int = 8, length: int = 64) -> Tensor:
    return torch.randn(rows, length, 64)


def planned(model: nn.Module, inner: str = "eager", **options: Any) -> nn.Module:
    gact_fx.compile(model, **{"budget_bits": 4, "inner": inner, "min_elements": 256, **options})
    for _ in range(2):
        model(batch()).backward()
    return model


def per_channel(model: nn.Module) -> list[Row]:
    return [row for row in gact_fx.inspect(model).rows if row.per_channel]


def error(model: nn.Module, exact: nn.Module, x: Tensor) -> float:
    """The squared error of a gradient, as a share of its squared norm."""
    model.zero_grad()
    exact.zero_grad()
    model(x).backward()
    exact(x).backward()
    pairs = list(zip(gradients(model), gradients(exact), strict=True))
    return sum(float((f - w).square().sum()) for f, w in pairs) / sum(float(w.square().sum()) for _, w in pairs)


def pair(kind: type[SticksOut], inner: str = "eager", **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model, exact = kind(), kind()
    exact.load_state_dict(model.state_dict())
    return planned(model, inner, **options), exact


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [SticksOut, Sums, Views])
def test_where_channels_stick_out_groups_lie_within_them(kind: type[SticksOut], inner: str) -> None:
    model, exact = pair(kind, inner)
    assert per_channel(model)
    uniform, _ = pair(kind, inner, adaptive=False)
    assert not per_channel(uniform)
    torch.manual_seed(1)
    found = sum(error(model, exact, batch()) for _ in range(8))
    assert gact_fx.inspect(model).bytes_after <= 1.05 * gact_fx.inspect(uniform).bytes_after
    assert 2 * found < sum(error(uniform, exact, batch()) for _ in range(8))
    assert found < 8 * 1e-2


def test_where_none_does_they_are_neighbours() -> None:
    torch.manual_seed(0)
    assert not per_channel(planned(SticksOut(gain=1.0)))


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_other_sizes_have_them_too(inner: str) -> None:
    model, exact = pair(SticksOut, inner)
    for rows, length in ((8, 64), (3, 64), (20, 40), (1, 16)):
        assert error(model, exact, batch(rows, length)) < 0.1
        assert per_channel(model)


def test_a_plan_is_saved_with_them(tmp_path: Path) -> None:
    model, _ = pair(SticksOut)
    plan = gact_fx.inspect(model).plan
    assert plan is not None
    plan.save(tmp_path / "plan.json")
    again = gact_fx.compile(SticksOut(), plan=tmp_path / "plan.json", inner="eager", min_elements=256)
    again(batch()).backward()
    assert gact_fx.Plan.load(tmp_path / "plan.json") == plan
    assert [row.name for row in per_channel(again)] == [row.name for row in per_channel(model)]


def test_the_tables_say_so() -> None:
    model, _ = pair(SticksOut)
    plan = gact_fx.inspect(model).plan
    assert plan is not None
    assert "per channel" in gact_fx.inspect(model).table()
    assert "per channel" in plan_text(plan)


class Image(nn.Module):
    """Channels of an image that is stored channels-last lie apart, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 4, 3, padding=1)
        self.a.weight.data[::7] *= 40

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x))).square().mean()


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_images(layout: torch.memory_format, inner: str) -> None:
    torch.manual_seed(0)
    model, exact = Image(), Image()
    exact.load_state_dict(model.state_dict())
    gact_fx.compile(model, budget_bits=4, inner=inner, min_elements=256)
    for _ in range(3):
        x = torch.randn(4, 3, 24, 24).to(memory_format=layout)
        assert error(model, exact, x) < 2e-2
    if layout is torch.channels_last and inner == "inductor":
        assert per_channel(model)
