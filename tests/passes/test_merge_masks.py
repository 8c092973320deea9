"""Codes that tell a ReLU's mask as well: exact decisions, known bytes, an error that is measured before it is made."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from activation_bytes import activation_bytes
from conftest import Trace, analyze, gradients, relative_error
from torch import nn

import gact_fx
from gact_fx import ops
from gact_fx.codec.code import Code
from gact_fx.passes.encodings import Quantize
from gact_fx.plan import TensorPlan

INNER = pytest.mark.parametrize("inner", ["inductor", "eager"])


class Normed(nn.Module):
    """Residual blocks: a ReLU behind batch norm, and one behind the sum with the shortcut."""

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [3, *[width] * (2 * depth)]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in self.convs)
        self.head = nn.Linear(width, 10)
        for norm in self.norms:
            nn.init.uniform_(norm.weight, -1.5, 1.5)  # type: ignore[arg-type]
            nn.init.uniform_(norm.bias, -0.5, 0.5)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in range(0, len(self.convs), 2):
            inner = torch.relu(self.norms[first](self.convs[first](x)))
            inner = self.norms[first + 1](self.convs[first + 1](inner))
            x = torch.relu(inner + (x if first else 0))
        loss: torch.Tensor = self.head(x.mean((2, 3))).square().mean()
        return loss


class Plain(nn.Module):
    """ReLUs behind linear layers: what they stop is 0, and nothing is lost."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


class Leaking(Normed):
    """What the ReLU stops goes on by another way, and matters."""

    def leak(self, y: torch.Tensor) -> torch.Tensor:
        return 0.5 * y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = norm(conv(x))
            x = torch.relu(y) - self.leak(y)
        loss: torch.Tensor = self.head(x.mean((2, 3))).square().mean()
        return loss


class Bending(Leaking):
    def leak(self, y: torch.Tensor) -> torch.Tensor:
        return 2 * torch.sigmoid(3 * y)


def images(rows: int = 8, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


ROWS = torch.randn(128, 64, generator=torch.Generator().manual_seed(1))


def planned(
    model: nn.Module, x: torch.Tensor, change: Callable[[TensorPlan], TensorPlan] = lambda t: t, **options: Any
) -> Any:
    """``model`` compiled by a plan of its own, every tensor's entry changed."""
    options = {"inner": "eager", "min_elements": 64, "budget_bits": 8, **options}
    torch._dynamo.reset()
    gact_fx.compile(model, sample_batches=[(x,)], **options)
    plan = gact_fx.inspect(model).plan
    assert plan is not None
    graphs = tuple(replace(graph, tensors=tuple(map(change, graph.tensors))) for graph in plan.graphs)
    torch._dynamo.reset()
    fresh = type(model)()
    fresh.load_state_dict(model.state_dict())
    return gact_fx.compile(fresh, plan=replace(plan, graphs=graphs), **options)


def merged(plan: gact_fx.Plan | None) -> list[TensorPlan]:
    assert plan is not None
    return [tensor for graph in plan.graphs for tensor in graph.tensors if tensor.merged]


def everything_merged(entry: TensorPlan) -> TensorPlan:
    """8 bits; entries whose codes can tell no mask do not fit, and get the width of the budget."""
    code = Code(8) if entry.code is None else replace(entry.code, bits=8)
    return replace(entry, code=code, merged=True)


def exact_gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    reference = type(model)()
    reference.load_state_dict(model.state_dict())
    reference(x).backward()
    return gradients(reference)


# ---- Codes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_codes_tell_the_mask_exactly(bits: int, rounding: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5000, generator=generator).to(dtype)
    mask = torch.rand(5000, generator=generator) < torch.linspace(0, 1, 5000)
    mask[:300], mask[-300:] = False, True
    marked = x.masked_fill(mask, float("nan"))
    codec = (bits, 64, 7)
    values = ops.decompress(ops.compress(marked, *codec, rounding=rounding), x.shape, dtype, *codec, rounding=rounding)
    assert torch.equal(values.isnan(), mask)
    passed = x[~mask].double()
    # A step is rounded up to four bits of mantissa (float64's to one), a bfloat16 result to eight.
    step = float(passed.max() - passed.min()) / (2**bits - 2) * (1.5 if dtype == torch.float64 else 1 + 2**-4)
    slack = 2**-7 * float(passed.abs().max()) if dtype.itemsize == 2 else 1e-6
    assert float((values[~mask].double() - passed).abs().max()) <= step + slack


# ---- What is found ----------------------------------------------------------------------------------------------


@INNER
def test_masks_behind_batch_norm_and_of_results(trace: Trace, inner: str) -> None:
    found = analyze(trace(Normed(), images(), inner=inner, recompute="auto" if inner == "inductor" else "off"))
    with_mask = [how for how in found.encodings if isinstance(how, Quantize) and how.masks]
    assert with_mask and all(how.merges in how.masks for how in with_mask)


def test_masks_are_spread_over_the_tensors_that_they_follow_from(trace: Trace) -> None:
    """The sum's mask follows from both convolutions; the first one has a mask already."""
    found = analyze(trace(Normed(depth=1), images(), inner="inductor", recompute="auto"))
    hosting = [how for how in found.encodings if isinstance(how, Quantize) and how.masks]
    assert all(len(how.masks) == 1 for how in hosting)


@pytest.mark.parametrize("function", [torch.abs, lambda y: y.clamp(-0.5, 0.5), nn.functional.leaky_relu])
def test_other_decisions_are_not_merged(trace: Trace, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    found = analyze(trace(lambda x: (function(x @ weight) @ weight).square().sum(), torch.randn(64, 64)))
    assert not any(how.merges for _, how in found.quantized())


# ---- Gradients --------------------------------------------------------------------------------------------------


@INNER
@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
def test_nothing_is_lost_of_a_relus_result(inner: str, rounding: str) -> None:
    def chosen(entry: TensorPlan) -> TensorPlan:
        found = everything_merged(entry)
        assert found.code is not None
        return replace(found, code=replace(found.code, rounding=rounding))

    model = planned(Plain(), ROWS, chosen, inner=inner)
    model(ROWS).backward()
    assert sum("merged" in row.reason for row in gact_fx.inspect(model).rows) >= 3
    found = gradients(model)
    assert relative_error(found, exact_gradients(model, ROWS)) < 0.01
    # Where a ReLU stops everything, the gradient is 0, exactly.
    dead = [(g == 0) for g in exact_gradients(model, ROWS)]
    assert all(bool((f[d] == 0).all()) for f, d in zip(found, dead, strict=True))


@pytest.mark.slow
def test_behind_batch_norm_the_stopped_come_back_as_their_mean() -> None:
    x = images()
    model = planned(Normed(), x, everything_merged, inner="inductor")
    exact = exact_gradients(model, x)
    model(x).backward()
    assert sum("merged" in row.reason for row in gact_fx.inspect(model).rows) >= 3
    error = relative_error(gradients(model), exact)
    # Rounding at 8 bits alone makes 0.002; with 0 in the mean's place it is 0.87.
    assert 0.005 < error < 0.1


def test_what_is_filled_in_is_the_mean_of_the_channel() -> None:
    """One value of all others is known from the rest: with a single stopped element a channel nothing is lost."""
    norm = nn.BatchNorm1d(8)
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    x[0] = -5.0
    nn.init.constant_(norm.bias, 3.0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8, bias=False), norm
            nn.init.eye_(self.linear.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.norm(self.linear(x))).square().mean()

    model = planned(Net(), x, everything_merged, inner="inductor")
    model(x).backward()
    assert any("merged" in row.reason for row in gact_fx.inspect(model).rows)
    assert relative_error(gradients(model), exact_gradients(model, x)) < 0.01


def test_half_precision() -> None:
    model = Plain().bfloat16()
    x = ROWS.bfloat16()
    gact_fx.compile(model, budget_bits=3, sample_batches=[(x,)], inner="eager", min_elements=64)
    assert merged(gact_fx.inspect(model).plan)
    error = gact_fx.measure_gradient_error(model, [(x,)], draws=32).total
    assert error.bias_estimate**2 < 0.1 * error.variance


@INNER
def test_varying_batch_sizes(inner: str) -> None:
    model = planned(Normed(), images(), everything_merged, inner=inner)
    for rows in (8, 6, 5):
        exact = exact_gradients(model, images(rows))
        model(images(rows)).backward()
        assert relative_error(gradients(model), exact) < 0.15


class Views(nn.Module):
    """A ReLU's result and a view of it are both saved, and are one code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(nn.Conv2d(a, 4, 3) for a in (3, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.convs[0](x))
        return self.convs[1](y).square().mean() + self.convs[2](y.transpose(2, 3)).square().mean()


@INNER
@pytest.mark.parametrize("recompute", ["off", "auto"])
def test_views_of_a_merged_tensor(inner: str, recompute: str) -> None:
    x = images()
    model = Views()
    options: dict[str, Any] = {"inner": inner, "recompute": recompute, "budget_bits": 3, "min_elements": 64}
    gact_fx.compile(model, sample_batches=[(x,)], **options)
    assert relative_error_of(model, x) < 0.1
    model = planned(Views(), x, everything_merged, inner=inner, recompute=recompute)
    assert relative_error_of(model, x) < 0.02


class OwnShift(nn.Module):
    """Divides by the batch's deviation, but subtracts a number of its own: its channels do not sum to zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.shift = nn.Parameter(torch.linspace(-1, 1, 8).view(1, 8, 1, 1))
        self.gain, self.weight = nn.Parameter(torch.ones(1, 8, 1, 1)), nn.Parameter(torch.randn(1, 8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        with torch.no_grad():
            variance, _ = torch.var_mean(h, (0, 2, 3), correction=0, keepdim=True)
            rstd = (variance + 1e-5).rsqrt()
        centred = h - self.shift
        y = torch.relu(centred * rstd * self.gain)
        return self.last(y).square().mean() + 0.3 * (centred * self.weight).mean()


@INNER
def test_what_is_not_centred_by_its_mean(inner: str) -> None:
    x = images()
    model = planned(OwnShift(), x, everything_merged, inner=inner)
    exact = exact_gradients(model, x)
    model(x).backward()
    for found, wanted in zip(gradients(model), exact, strict=True):
        assert relative_error([found], [wanted]) < 0.05 or float(wanted.norm()) < 1e-4


# ---- Figures ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@INNER
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("network", [Normed, Plain])
def test_the_predicted_variance_is_the_measured_one(
    network: type[nn.Module], bits: int, inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At 2 bits rotated codes with the mask beside them are better than codes that tell it.
    monkeypatch.setattr("gact_fx.planning.budget.ROTATING_BITS", 0)
    model, batches = network(), [(images(seed=s),) if network is Normed else (ROWS + s,) for s in range(3)]
    options: dict[str, Any] = {"inner": inner, "budget_bits": bits, "min_elements": 64}
    gact_fx.compile(model, sample_batches=batches, **options)
    plan = gact_fx.inspect(model).plan
    assert merged(plan) and plan is not None and plan.variance is not None
    found = gact_fx.measure_gradient_error(model, batches, draws=16).total
    # Of products of rounded tensors at 2 bits the prediction knows the first order.
    assert 0.7 < plan.variance / found.variance < 1.4
    assert found.bias_estimate**2 < 0.1 * found.variance


@pytest.mark.slow
def test_what_matters_is_not_lost() -> None:
    """The planner leaves the mask beside the codes where the stopped elements move the gradient."""
    x = images()
    model = Leaking()
    gact_fx.compile(model, sample_batches=[(x,)], inner="inductor", budget_bits=4, min_elements=64)
    assert not merged(gact_fx.inspect(model).plan)
    sensible = relative_error_of(planned(Leaking(), x, lambda entry: entry, inner="inductor"), x)
    careless = planned(Leaking(), x, everything_merged, inner="inductor")
    assert relative_error_of(careless, x) > 5 * sensible
    assert any("merged" in row.reason for row in gact_fx.inspect(careless).rows)


@pytest.mark.slow
@INNER
def test_what_leaks_by_way_of_a_bend(inner: str) -> None:
    """Masks beside the codes, where the sigmoid is computed again; eager PyTorch saves what it returns."""
    x, model = images(), Bending()
    gact_fx.compile(model, sample_batches=[(x,)], inner=inner, budget_bits=8, min_elements=64)
    if inner == "inductor":
        assert not merged(gact_fx.inspect(model).plan)
    assert relative_error_of(model, x) < 0.015
    assert (gact_fx.inspect(model).average_bits or 0) <= 8


def relative_error_of(model: nn.Module, x: torch.Tensor) -> float:
    exact = exact_gradients(model, x)
    model(x).backward()
    return relative_error(gradients(model), exact)


@INNER
def test_bytes_are_those_that_inspect_says(inner: str) -> None:
    x = images()
    model = gact_fx.compile(Normed(), sample_batches=[(x,)], inner=inner, budget_bits=3)
    assert merged(gact_fx.inspect(model).plan)
    held = activation_bytes(model(x), exclude=[*model.parameters(), *model.buffers(), x])
    report = gact_fx.inspect(model)
    assert held == report.bytes_after and report.average_bits is not None and report.average_bits <= 3


def test_uniform_widths_leave_masks_beside_the_codes() -> None:
    model = gact_fx.compile(Normed(), sample_batches=[(images(),)], inner="eager", budget_bits=4, adaptive=False)
    assert not merged(gact_fx.inspect(model).plan)


def test_a_plan_keeps_it(tmp_path: Path) -> None:
    model = gact_fx.compile(Normed(), sample_batches=[(images(),)], inner="eager", budget_bits=3)
    plan = gact_fx.inspect(model).plan
    assert plan is not None and merged(plan)
    plan.save(tmp_path / "plan.json")
    assert gact_fx.Plan.load(tmp_path / "plan.json") == plan


def test_algorithm_1_merges_what_loses_nothing() -> None:
    kinds: Sequence[tuple[nn.Module, torch.Tensor]] = ((Plain(), ROWS), (Normed(), images()))
    found = []
    for model, x in kinds:
        torch._dynamo.reset()
        options: dict[str, Any] = {
            "inner": "inductor",
            "budget_bits": 2,
            "min_elements": 64,
            "sensitivity": "empirical",
        }
        gact_fx.compile(model, sample_batches=[(x,)], **options)
        found.append([tensor.key for tensor in merged(gact_fx.inspect(model).plan)])
    plain, normed = found
    assert plain and all("relu" in key for key in plain + normed)
