"""Codes with groups within channels: who gets them, what they gain, and that views and other sizes read them."""

import copy
from dataclasses import replace
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
from gact_fx.plan import TensorPlan

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
    # Beside rotated groups, those within channels are not the best here.
    asked = {"budget_bits": 3, "inner": inner, "min_elements": 256, "rounding": "dither"}
    gact_fx.compile(model, **{**asked, **options})
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
@pytest.mark.parametrize("kind", [SticksOut, Sums])
def test_where_channels_stick_out_groups_lie_within_them(kind: type[SticksOut], inner: str) -> None:
    model, exact = pair(kind, inner)
    assert per_channel(model)
    uniform, _ = pair(kind, inner, adaptive=False, rounding="auto")
    assert not per_channel(uniform)
    torch.manual_seed(1)
    found = sum(error(model, exact, batch()) for _ in range(8))
    assert gact_fx.inspect(model).bytes_after <= 1.05 * gact_fx.inspect(uniform).bytes_after
    assert 2 * found < sum(error(uniform, exact, batch()) for _ in range(8))
    assert found < 8 * 1e-2


def test_what_auto_takes_in_their_place_is_better() -> None:
    dithered, exact = pair(SticksOut)
    auto, _ = pair(SticksOut, rounding="auto")
    torch.manual_seed(1)
    errors = [sum(error(model, exact, batch()) for _ in range(8)) for model in (auto, dithered)]
    assert errors[0] < 0.7 * errors[1]
    assert gact_fx.inspect(auto).bytes_after <= 1.02 * gact_fx.inspect(dithered).bytes_after


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

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x))).square().mean()


def forced(model: nn.Module, x: Tensor, inner: str) -> nn.Module:
    """Compiled by a plan in which all codes of values have groups within channels."""
    sample = gact_fx.compile(copy.deepcopy(model), budget_bits=8, adaptive=False, inner=inner, min_elements=256)
    for _ in range(2):
        sample(x).backward()
    plan = gact_fx.inspect(sample).plan
    assert plan is not None
    graphs = [replace(g, tensors=tuple(map(in_channels, g.tensors))) for g in plan.graphs]
    return gact_fx.compile(model, plan=replace(plan, graphs=tuple(graphs)), inner=inner, min_elements=256)


def in_channels(entry: TensorPlan) -> TensorPlan:
    is_of_values = entry.code is not None and entry.stored == "values" and not entry.merged
    return replace(entry, code=replace(entry.code, per_channel=True)) if is_of_values and entry.code else entry


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [SticksOut, Sums, Views])
def test_whoever_reads_them_reads_the_same(kind: type[SticksOut], inner: str) -> None:
    torch.manual_seed(0)
    model, exact = kind(gain=1.0), kind(gain=1.0)
    exact.load_state_dict(model.state_dict())
    forced(model, batch(), inner)
    for rows in (8, 3):
        assert error(model, exact, batch(rows)) < 1e-3
    assert per_channel(model)


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_images(layout: torch.memory_format, inner: str) -> None:
    torch.manual_seed(0)
    model, exact = Image(), Image()
    exact.load_state_dict(model.state_dict())
    x = torch.randn(4, 3, 24, 24).to(memory_format=layout)
    forced(model, x, inner)
    assert error(model, exact, x) < 1e-3
    assert per_channel(model)


class Attention(nn.Module):
    """Fused attention reads memory as it lies, and its kernels want the last dimension together."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 3 * 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (h.unflatten(-1, (4, 16)).transpose(1, 2) for h in self.a(x).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.b(h.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(inner: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, exact = Attention().to(dtype), Attention().to(dtype)
    exact.load_state_dict(model.state_dict())
    x = batch().to(dtype)
    forced(model, x, inner)
    assert error(model, exact, x) < 1e-3
    assert per_channel(model)
