import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Trace, analyze, gradients, masks_of, relative_error, run_pass
from torch import nn
from torch.nn import functional as F

import gact_fx
from gact_fx.passes.find_masks import find_masks


def test_relu_output_that_is_used_both_ways_carries_its_mask(trace: Trace) -> None:
    v, w = nn.Parameter(torch.randn(16, 32)), nn.Parameter(torch.randn(32, 8))
    analysis = analyze(trace(lambda x: ((x @ v).relu() @ w).sum().sin(), torch.randn(8, 16)))
    carrying = [(d.label, len(masks_of(d))) for d in analysis.encodings if masks_of(d)]
    assert carrying == [("quantize", 1)] or not carrying  # a partitioner may save the mask itself
    encodings = {t.op: d.label for t, d in zip(analysis.saved, analysis.encodings, strict=True)}
    assert encodings["aten.relu"] == "quantize"


def test_a_tensor_that_is_only_compared_is_one_bit(trace: Trace) -> None:
    v = nn.Parameter(torch.randn(16, 32))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ v
        return torch.where(y > 0.5, y * 3, y).sum()

    pair = trace(function, torch.randn(8, 16))
    lossy = frozenset(value.name for value in pair.saved_values() if value.source.meta["val"].is_floating_point())
    masks = find_masks(pair, lossy)
    analysis = analyze(pair)
    for tensor, decision in zip(analysis.saved, analysis.encodings, strict=True):
        if masks_of(decision):
            assert decision.label == "mask" and tensor.name not in masks.values


def test_a_recomputed_chain_that_ends_in_a_comparison_is_a_mask(trace: Trace) -> None:
    conv, bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
    pair = trace(
        lambda x: nn.functional.max_pool2d(bn(conv(x)).relu(), 2).sum(), torch.randn(4, 3, 10, 10), inner="inductor"
    )
    analysis = analyze(pair)
    hosts = [t.op for t, d in zip(analysis.saved, analysis.encodings, strict=True) if masks_of(d)]
    # torch 2.11 saves the ReLU's output for its maximum pool, later versions recompute it from the convolution's.
    assert hosts in (["aten.convolution"], ["aten.relu"])


def test_integers_computed_from_values_refuse_them(trace: Trace) -> None:
    v = nn.Parameter(torch.randn(16, 32))
    pair = trace(lambda x: (x @ v).tanh().sum(), torch.randn(8, 16))
    graph = pair.backward.graph
    tanh = next(t for t in run_pass("find_saved_tensors", pair).saved if t.op == "aten.tanh")
    saved = next(value for value in pair.saved_values() if value.name == tanh.name)
    user = next(iter(saved.placeholder.users))
    with graph.inserting_before(user):
        count = graph.call_function(torch.ops.prims.convert_element_type.default, (saved.placeholder, torch.int32))
        count.meta["val"] = saved.placeholder.meta["val"].int()
    user.replace_input_with(saved.placeholder, count)
    masks = find_masks(pair, frozenset({saved.name}))
    assert "convert_element_type" in masks.refused[saved.name] and not masks.hosts


@pytest.mark.parametrize(
    "shrink", [lambda h: h.amax(1) + h.std(1), lambda h: h.norm(math.inf, dim=1) + h.square().mean(1)]
)
def test_a_count_of_decisions_is_as_exact_as_these(shrink: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 256), nn.Linear(256, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(shrink(self.first(x))).logsumexp(1).sum()

    # Several elements are the largest, and backward divides by how many.
    model, x = Net(), torch.randn(16, 64, 3).sign()
    model(x).backward()
    exact = gradients(model)
    gact_fx.compile(model, budget_bits=8, inner="eager")
    for _ in range(2):
        model.zero_grad()
        model(x).backward()
    assert relative_error(gradients(model), exact) < 0.01
    (row,) = (row for row in gact_fx.inspect(model).rows if math.prod(row.shape) == 16 * 64 * 256)
    assert row.encoding == "quantize"


def test_decisions_larger_than_what_they_follow_from(trace: Trace) -> None:
    w = nn.Parameter(torch.randn(16, 1))

    def pairwise(x: torch.Tensor) -> torch.Tensor:
        z = (x @ w)[:, 0]
        return torch.relu(1 - (z[:, None] - z[None, :])).mean()

    analysis = analyze(trace(pairwise, torch.randn(512, 16), inner="inductor"))
    assert not any(masks_of(decision) for decision in analysis.encodings)


class Huber(nn.Module):
    """Backward asks for signs of differences only to compare magnitudes with 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, last = self.layers
        y = first(x)
        z = third(second(F.batch_norm(y, None, None, training=True)))
        difference = F.smooth_l1_loss(z, y, reduction="none")
        return (difference.tanh() * torch.linspace(-1, 1, 32)).sum() + last(difference).tanh().sum()


def test_values_are_not_folded_by_a_decision_that_leads_to_another_alone() -> None:
    model, reference, x = Huber(), Huber(), torch.randn(64, 32)
    reference.load_state_dict(model.state_dict())
    gact_fx.compile(model, budget_bits=8, inner="eager", sample_batches=[x])
    model(x).backward(), reference(x).backward()
    assert relative_error(gradients(model), gradients(reference)) < 0.015


STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "frac": lambda y: torch.frac(8 * y),
    "floor_divide": lambda y: torch.floor_divide(y.detach(), 0.05),
    "div floor": lambda y: torch.div(y, 0.05, rounding_mode="floor"),
    "div trunc": lambda y: torch.div(y, y.detach().abs().mean() / 10, rounding_mode="trunc"),
    "remainder": lambda y: torch.remainder(y, 0.1) * 10,
    "fmod": lambda y: torch.fmod(y, 0.1) * 10,
    "round": lambda y: torch.round(y, decimals=1),
    "trunc": lambda y: torch.fix(8 * y),
    "sign": torch.sgn,
    "copysign": lambda y: torch.copysign(torch.ones_like(y), y),
    "heaviside": lambda y: torch.heaviside(y.detach(), torch.tensor(0.5)),
    "angle": torch.angle,
    "atan2": lambda y: torch.atan2(y / 100, y.roll(1, 1) - 1),
    "mantissa": lambda y: torch.frexp(y.detach()).mantissa,
    "hardshrink": lambda y: F.hardshrink(y, 0.3),
    "fake_quantize": lambda y: torch.fake_quantize_per_tensor_affine(y, 0.1, 0, -128, 127),
    "bucketize": lambda y: torch.bucketize(y.detach(), torch.linspace(-1, 1, 20)).float(),
    "int": lambda y: (8 * y).int().float(),
}


class Stepped(nn.Module):
    """Steps of one product, times another."""

    def __init__(self, step: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.left, self.right, self.step = nn.Linear(32, 32), nn.Linear(32, 32), step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.left(x)
        return (self.step(y) * self.right(x)).square().mean() + y.sin().square().mean()


@pytest.mark.parametrize("recompute", ["auto", pytest.param("off", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STEPS)
def test_no_step_is_taken_from_rounded_values(name: str, recompute: str) -> None:
    model, reference, x = Stepped(STEPS[name]), Stepped(STEPS[name]), torch.randn(64, 32)
    reference.load_state_dict(model.state_dict())
    options: dict[str, Any] = {"adaptive": False, "rounding": "dither", "min_elements": 64, "recompute": recompute}
    gact_fx.compile(model, budget_bits=8, inner="eager", sample_batches=[x], **options)
    model(x).backward(), reference(x).backward()
    assert relative_error(gradients(model), gradients(reference)) < 0.015
