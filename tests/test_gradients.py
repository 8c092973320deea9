"""The promises about gradients, against eager autograd."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from conftest import Mixed, gradients, mixed_batch, relative_error
from torch import nn

import gact_fx
from gact_fx import Plan
from gact_fx.codec.code import Code

INNER = pytest.mark.parametrize("inner", ["inductor", "eager"])


class Dropped(nn.Module):
    """Positively homogeneous of degree 1 in each weight, so that <df/dw, w> = f whatever mask dropout drew."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (32, 128, 128, 64)
        self.weights = nn.ParameterList(torch.randn(a, b) / a**0.5 for a, b in itertools.pairwise(sizes))
        # Positive: a sum that cancels would measure the codes' noise against nearly nothing.
        self.register_buffer("direction", torch.rand(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = nn.functional.dropout((x @ weight).relu(), 0.3)
        return (x * self.direction).sum()  # type: ignore[operator]


@INNER
@pytest.mark.parametrize("recompute", ["auto", "off", "full"])
def test_dropout_masks_of_forward_and_backward_are_one(inner: str, recompute: str) -> None:
    model, x = Dropped(), torch.randn(64, 32)
    options: dict[str, Any] = {"budget_bits": 8, "inner": inner, "recompute": recompute}
    gact_fx.compile(model, sample_batches=[x], loss_fn=lambda m, b: m(b), **options)
    for _ in range(3):
        loss = model(x)
        loss.backward()
        assert gact_fx.inspect(model).ratio > 3
        for weight, gradient in zip(model.weights, gradients(model), strict=True):
            assert float(((gradient * weight).sum() / loss).detach()) == pytest.approx(1, abs=1e-2)


@INNER
def test_gradients_with_dropout_given_the_same_mask(inner: str) -> None:
    model, reference, batch = Mixed(dropout=0.2), Mixed(dropout=0.2), mixed_batch(32)
    reference.load_state_dict(model.state_dict())
    # Inductor then draws dropout as eager does.
    with torch._inductor.config.patch(fallback_random=True):
        gact_fx.compile(model, budget_bits=8, inner=inner, sample_batches=[batch])
        for seed in range(2):
            torch.manual_seed(seed)
            loss = model(*batch)
            loss.backward()
            torch.manual_seed(seed)
            exact = reference(*batch)
            exact.backward()
            torch.testing.assert_close(loss, exact, rtol=1e-4, atol=1e-5)
            assert relative_error(gradients(model), gradients(reference)) < 0.02


def reseeded(plan: Plan, seed: int) -> Plan:
    def changed(code: Code | None) -> Code | None:
        return code and replace(code, seed=code.seed ^ (seed * 0x9E3779B97F4A7C15 % 2**62))

    graphs = (replace(g, tensors=tuple(replace(t, code=changed(t.code)) for t in g.tensors)) for g in plan.graphs)
    return replace(plan, graphs=tuple(graphs))


@pytest.mark.slow
def test_the_mean_gradient_over_seeds_is_the_exact_one() -> None:
    """Within 3 standard errors over 64 seeds, at 4 bits: in total, and for every parameter."""
    model, batch, seeds = Mixed(), mixed_batch(16), 64
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model(*batch).backward()
    exact = gradients(model)
    gact_fx.compile(model, inner="eager", sample_batches=[batch])
    plan = gact_fx.inspect(model).plan
    assert plan is not None
    draws = []
    for seed in range(1, seeds + 1):
        model.load_state_dict(state)
        gact_fx.compile(model, inner="eager", plan=reseeded(plan, seed))
        model(*batch).backward()
        draws.append(gradients(model))
        torch._dynamo.reset()
    bias, noise = [], []
    for values, wanted in zip(zip(*draws, strict=True), exact, strict=True):
        stacked = torch.stack(values).double()
        bias.append(float((stacked.mean(0) - wanted).square().sum()))
        noise.append(float(stacked.var(0).sum()) / seeds)
    assert sum(noise) > 0
    assert sum(bias) ** 0.5 <= 3 * sum(noise) ** 0.5
    for squared_bias, squared_error in zip(bias, noise, strict=True):
        assert squared_bias**0.5 <= 3 * squared_error**0.5 + 1e-6


@INNER
def test_relu_masks_are_exact_whatever_the_width(inner: str) -> None:
    """The gradient of the batch norm's shift reads nothing but the ReLU's decisions: a flipped one would show."""

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3))

    model, reference = build(), build()
    reference.load_state_dict(model.state_dict())
    x = torch.randn(8, 3, 12, 12)
    options: dict[str, Any] = {
        "budget_bits": 2,
        "adaptive": False,
        "sample_batches": [x],
        "loss_fn": lambda m, b: m(b).sum(),
    }
    gact_fx.compile(model, inner=inner, **options)
    model(x).sum().backward(), reference(x).sum().backward()
    assert gact_fx.inspect(model).ratio > 4
    torch.testing.assert_close(model[1].bias.grad, reference[1].bias.grad, rtol=1e-4, atol=1e-3)


def test_every_step_draws_new_noise() -> None:
    model, x = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)), torch.randn(64, 32)
    gact_fx.compile(model, inner="eager", sample_batches=[x], loss_fn=lambda m, b: m(b).square().sum())
    reference = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    errors = []
    for _ in range(2):
        reference.load_state_dict(model.state_dict())
        model(x).square().sum().backward(), reference(x).square().sum().backward()
        found, exact = gradients(model), gradients(reference)
        errors.append(torch.cat([(a - b).flatten() for a, b in zip(found, exact, strict=True)]))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                parameter -= 1e-3 * gradient  # type: ignore[misc]
    correlation = torch.nn.functional.cosine_similarity(errors[0], errors[1], dim=0)
    assert abs(float(correlation)) < 0.3


@INNER
def test_checkpointed_dropout(inner: str) -> None:
    """A checkpointed region draws its mask again in backward, from the saved seed: also while profiling."""

    class Checkpointed(Dropped):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                x = torch.utils.checkpoint.checkpoint(self.layer, x, weight, use_reentrant=False)
            return (x * self.direction).sum()  # type: ignore[operator]

        @staticmethod
        def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout((x @ weight).relu(), 0.3)

    model, x = Checkpointed(), torch.randn(64, 32)
    gact_fx.compile(model, budget_bits=8, inner=inner)
    for _ in range(3):
        loss = model(x)
        loss.backward()
        for weight, gradient in zip(model.weights, gradients(model), strict=True):
            assert float(((gradient * weight).sum() / loss).detach()) == pytest.approx(1, abs=1e-2)


@INNER
def test_losses_that_divide_by_what_they_saved(inner: str) -> None:
    model, reference = nn.Linear(16, 64), nn.Linear(16, 64)
    reference.load_state_dict(model.state_dict())
    x, target = torch.randn(64, 16) * 4, torch.rand(64, 64)
    loss = gact_fx.compile(
        lambda m: nn.functional.binary_cross_entropy(m(x).sigmoid(), target), budget_bits=4, adaptive=False, inner=inner
    )
    for _ in range(2):
        loss(model).backward()  # type: ignore[no-untyped-call]
        nn.functional.binary_cross_entropy(reference(x).sigmoid(), target).backward()
        assert relative_error(gradients(model), gradients(reference)) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["stochastic", "dither", "nearest"])
@pytest.mark.parametrize(
    ("inner", "dtype"),
    [("inductor", torch.float32), ("eager", torch.float32), ("eager", torch.float64), ("eager", torch.bfloat16)],
    ids=str,
)
def test_gradients_by_rounding_and_dtype(inner: str, rounding: str, dtype: torch.dtype) -> None:
    """Every rounding that the configuration names, in models of several precisions."""
    model, reference, (x, y) = Mixed().to(dtype), Mixed().to(dtype), mixed_batch(32)
    reference.load_state_dict(model.state_dict())
    batch = (x.to(dtype), y)
    gact_fx.compile(model, budget_bits=8, rounding=rounding, inner=inner, sample_batches=[batch])
    model(*batch).backward()
    reference(*batch).backward()
    report = gact_fx.inspect(model)
    assert report.plan is not None
    tensors = [tensor for graph in report.plan.graphs for tensor in graph.tensors]
    # bfloat16 knows no dither.
    assert {t.code.rounding for t in tensors if t.code is not None and t.code.bits <= 8} == {rounding}
    assert any(row.encoding == "quantize" and row.dtype == str(dtype).split(".")[1] for row in report.rows)
    limit = 0.03 if dtype == torch.bfloat16 else 0.01
    assert relative_error(gradients(model), gradients(reference)) < limit
