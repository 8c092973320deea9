"""`gact_fx.measure_gradient_error` against the same quantities computed directly."""

import copy
import dataclasses
import inspect
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Mixed, gradients, mixed_batch
from test_gradients import Dropped, reseeded
from torch import nn

import gact_fx
from gact_fx.diagnostics.gradient_error import GradientError, ParameterError
from gact_fx.diagnostics.gradient_moments import significance
from gact_fx.training.model import session_of
from gact_fx.training.session import Session

INNER = pytest.mark.parametrize("inner", ["inductor", "eager"])


def seeded_loss(model: Callable[..., Any], batch: Any) -> torch.Tensor:
    torch.manual_seed(7)
    loss: torch.Tensor = model(*batch)
    return loss


def batches(count: int) -> list[Any]:
    torch.manual_seed(5)
    # One of another size, so that the graphs are traced again with dynamic shapes.
    return [
        (torch.randn(rows, 3, 8, 8), torch.randint(0, 10, (rows,))) for rows in itertools.islice((16, 24, 16), count)
    ]


def exact_gradients(model: nn.Module, batches: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Eager gradients, stacked over batches, by name."""
    found = []
    for batch in batches:
        seeded_loss(model, batch).backward()
        found.append(gradients(model))
    names = [name for name, _ in model.named_parameters()]
    return {name: torch.stack(values).double() for name, values in zip(names, zip(*found, strict=True), strict=True)}


def rows_of(record: GradientError) -> dict[str, ParameterError]:
    return {row.name: row for row in record.parameters}


@pytest.mark.slow
def test_variance_and_prediction() -> None:
    """The variance is that over plans with other seeds, and what the plan predicted."""
    model, batch, seeds = Mixed(), mixed_batch(16), 32
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gact_fx.compile(model, inner="eager", profile_draws=16, sample_batches=[batch])
    plan = gact_fx.inspect(model).plan
    # A bias is a few numbers, whose variance takes many draws to be known.
    record = gact_fx.measure_gradient_error(model, [batch], draws=128)
    assert plan is not None and plan.variance is not None and record.predicted_variance == plan.variance
    assert 1 / 1.5 < record.total.variance / plan.variance < 1.5
    draws = []
    for seed in range(1001, 1001 + seeds):
        model.load_state_dict(state)
        gact_fx.compile(model, inner="eager", plan=reseeded(plan, seed))
        model(*batch).backward()
        draws.append(gradients(model))
        torch._dynamo.reset()
    direct = [float(torch.stack(values).double().var(0).sum()) for values in zip(*draws, strict=True)]
    assert record.total.variance == pytest.approx(sum(direct), rel=0.35)
    for row, variance in zip(record.parameters, direct, strict=True):
        assert row.variance == pytest.approx(variance, rel=0.6, abs=1e-12), row.name


@INNER
def test_exact_gradient_and_minibatch_variance_are_those_of_eager(inner: str) -> None:
    """With dropout, whose masks ``loss_fn`` fixes; Inductor draws them as eager does with fallback_random."""
    model, reference, sample = Mixed(dropout=0.3), Mixed(dropout=0.3), batches(3)
    reference.load_state_dict(model.state_dict())
    with torch._inductor.config.patch(fallback_random=True):
        gact_fx.compile(model, inner=inner, sample_batches=sample[:1])
        record = gact_fx.measure_gradient_error(model, sample, seeded_loss, draws=2)
    wanted = exact_gradients(reference, sample)
    assert [row.name for row in record.parameters] == list(wanted)
    for row in record.parameters:
        stacked = wanted[row.name]
        # The gradient of a bias before a batch norm is 0 but for roundoff.
        assert row.norm == pytest.approx(float(stacked.mean(0).norm()), rel=1e-5, abs=1e-6), row.name
        assert row.minibatch_variance == pytest.approx(float(stacked.var(0).sum()), rel=1e-4, abs=1e-10), row.name
        assert row.numel == stacked[0].numel()
    total = torch.cat([stacked.flatten(1) for stacked in wanted.values()], 1)
    assert record.total.norm == pytest.approx(float(total.mean(0).norm()), rel=1e-5)
    assert record.total.minibatch_variance == pytest.approx(float(total.var(0).sum()), rel=1e-4)
    assert record.total.noise == pytest.approx(record.total.variance / float(total.var(0).sum()), rel=1e-4)
    assert 1e-6 < record.total.noise < 0.1  # type: ignore[operator]  # the masks of all draws are one


@INNER
def test_dropout_masks_are_the_same_in_every_draw(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = Dropped(), [torch.randn(64, 32) for _ in range(2)]
    gact_fx.compile(model, budget_bits=8, inner=inner, sample_batches=sample[:1])
    compiled = []
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", lambda *args, **options: compiled.append(args))
    record = gact_fx.measure_gradient_error(model, sample, draws=4)
    assert not compiled
    # Other masks would make it as large as the gradient itself.
    assert 1e-4 < record.total.variance**0.5 / record.total.norm < 0.02
    assert record.total.bias < 0.02 * record.total.norm
    assert record.total.noise is not None and record.total.noise < 0.01


def linear_model(rounding: str) -> tuple[nn.Module, torch.Tensor]:
    """The gradient is linear in what is saved: the activation between the layers."""
    model, x = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 16)), torch.randn(256, 32)
    options: dict[str, Any] = {"adaptive": False, "rounding": rounding, "sample_batches": [x], "loss_fn": linear_loss}
    return gact_fx.compile(model, budget_bits=2, inner="eager", **options), x


def linear_loss(model: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    loss: torch.Tensor = (model(x) * torch.randn(256, 16, generator=generator)).sum()
    return loss


@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
def test_no_bias_where_there_is_none(rounding: str) -> None:
    model, x = linear_model(rounding)
    row = rows_of(gact_fx.measure_gradient_error(model, [x], linear_loss, draws=32))["1.weight"]
    assert row.variance > 1e-4 * row.norm**2 and not row.is_biased
    assert row.standard_error == pytest.approx((row.variance / 32) ** 0.5)
    # The norm of 1024 elements' noise is nearly certain, and here there is nothing else.
    assert row.bias == pytest.approx(row.standard_error, rel=0.25)
    assert row.bias_estimate < 0.75 * row.standard_error
    assert row.significance is not None and abs(row.significance) < 3


def test_the_bias_of_rounding_to_nearest_is_found() -> None:
    model, x = linear_model("nearest")
    record = gact_fx.measure_gradient_error(model, [x], linear_loss, draws=2)
    row = rows_of(record)["1.weight"]
    assert row.variance == 0 and row.bias > 0.01 * row.norm and row.bias_estimate == row.bias
    assert row.is_biased and record.total.is_biased
    assert "bias: beyond 3 standard errors" in str(record) and "beyond 3 standard errors: 1.weight" in str(record)
    # Nothing that is saved reaches the gradient of the last bias.
    assert rows_of(record)["1.bias"].bias == 0


def test_a_bias_that_hides_in_the_noise_of_many_elements() -> None:
    """gelu(Q(x)) is biased, by less than the noise of a few draws, and yet for sure."""
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))
    x = torch.randn(256, 32) * 2
    options: dict[str, Any] = {"adaptive": False, "rounding": "stochastic", "inner": "eager", "sample_batches": [x]}
    options["loss_fn"] = lambda m, b: m(b).square().sum()
    first = gact_fx.compile(copy.deepcopy(model), budget_bits=4, **options)
    plan = gact_fx.inspect(first).plan
    assert plan is not None
    # Left to itself, compile() stores what backward makes of x, without a bias.
    biased = [replace(g, tensors=tuple(replace(t, stored="values") for t in g.tensors)) for g in plan.graphs]
    del options["sample_batches"], options["loss_fn"]
    gact_fx.compile(model, budget_bits=4, plan=replace(plan, graphs=tuple(biased)), **options)
    record = gact_fx.measure_gradient_error(model, [x], lambda m, b: m(b).square().sum(), draws=16)
    row = rows_of(record)["2.weight"]
    assert row.bias < 3 * row.standard_error
    assert row.significance is not None and row.significance > 3 and row.is_biased
    assert 0.005 < row.bias_estimate / row.norm < 0.05
    assert "2.weight" in str(record).splitlines()[-1]


def test_significance_is_a_normal_deviate() -> None:
    """Over 400 experiments without bias, in 300 dimensions of unequal variance; and it grows with a bias."""

    def measure(bias: float) -> torch.Tensor:
        found = []
        for _ in range(400):
            errors = torch.randn(12, 300).double() * torch.linspace(0, 1, 300) + bias
            before = errors.cumsum(0) - errors
            value = significance((errors * before).sum(1).tolist())
            assert value is not None
            found.append(value)
        return torch.tensor(found)

    null = measure(0.0)
    assert abs(float(null.mean())) < 0.2 and float(null.std()) == pytest.approx(1, abs=0.15)
    assert int((null > 3).sum()) <= 4
    assert float((measure(0.2) > 3).double().mean()) > 0.8
    assert significance([0.0, 1.0, 2.0]) is None and significance([0.0] * 8) is None


def test_bias_and_standard_error_by_the_book() -> None:
    values: dict[str, Any] = {"norm": 2.0, "variance": 0.9, "count": 10, "significance": None}
    row = ParameterError.from_moments("w", 5, bias=0.5, minibatch_variance=3.0, **values)
    assert row.standard_error == pytest.approx(0.3) and row.bias_estimate == pytest.approx(0.4)
    assert row.noise == pytest.approx(0.3) and not row.is_biased
    row = ParameterError.from_moments("w", 5, bias=0.95, minibatch_variance=None, **values)
    assert row.is_biased and row.noise is None


class Block(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.a, self.b, self.breaks = nn.Linear(32, 64), nn.Linear(64, 32), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).tanh()
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.b(h).sin()


class Blocks(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(breaks) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.slow
def test_graph_breaks() -> None:
    """Also behind the tenth measurement, when Dynamo has reached its limit of recompilations of a frame."""
    model, x = Blocks(breaks=True), torch.randn(128, 32)
    options: dict[str, Any] = {"budget_bits": 4, "adaptive": False, "rounding": "stochastic"}
    norm, variance, broken = trained(model, x, 24, **options)
    records = [gact_fx.measure_gradient_error(broken, [x], draws=4).total for _ in range(10)]
    assert len({record.norm for record in records}) == 1
    assert records[0].norm == pytest.approx(norm, rel=1e-5)
    for record in records:
        assert record.variance == pytest.approx(variance, rel=0.35)
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        session = session_of(broken)
        assert session is not None
        graphs = len(session.graphs)
        broken(torch.randn(96, 32)).backward()
        assert len(session.graphs) > graphs  # training is not at the limit


def trained(model: nn.Module, x: torch.Tensor, seeds: int, **options: Any) -> tuple[float, float, nn.Module]:
    """The norm of the exact gradient, the variance of those that ``seeds`` models train with, and one of these."""
    found = []
    for seed in range(seeds):
        # torch 2.11 counts the recompilations of all of them together.
        torch._dynamo.reset()
        ours = gact_fx.compile(copy.deepcopy(model), inner="eager", seed=seed, sample_batches=[x], **options)
        for _ in range(2):
            # In the first step it is not known yet what eager PyTorch saves.
            ours.zero_grad()
            ours(x).backward()
        found.append(torch.cat([grad.flatten() for grad in gradients(ours)]))
    model(x).backward()
    exact = torch.cat([grad.flatten() for grad in gradients(model)])
    return float(exact.norm()), float(torch.stack(found).double().var(0).sum()), ours


class Indexed(nn.Module):
    """A graph without a gradient makes positions and values, which one behind a break saves, as graph networks have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            positions, weights = (x[:, 0] * 1000).long() % len(x), x.square() + 1
        torch._dynamo.graph_break()
        h = (self.first(x).index_select(0, positions) * weights.sum(1, keepdim=True)).tanh()
        return self.last(h).square().mean()


def test_the_graphs_are_those_of_training_behind_a_break(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What an earlier graph made for this one alone was taken for a tensor of the caller's, so that the plan did not
    fit, and that of the nearest graph was measured.
    """
    model, x = Indexed(), torch.randn(128, 32)
    gact_fx.compile(model, inner="eager", budget_bits=4, sample_batches=[x], min_elements=64)
    session = session_of(model)
    assert session is not None
    graphs: list[str] = []
    twin = session.twin
    monkeypatch.setattr(session, "twin", lambda *passes, **changes: _listed(twin(*passes, **changes), graphs))
    model(x).backward()
    gact_fx.measure_gradient_error(model, [x], draws=2)
    assert session.plan is not None and graphs == [graph.fingerprint for graph in session.plan.graphs]
    assert "was not profiled" not in caplog.text


def _listed(session: Session, graphs: list[str]) -> Session:
    session.rewritten = graphs
    return session


class Between(nn.Module):
    """What eager PyTorch saves between two graphs moves the gradient most."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(x))).square().mean()

    @torch.compiler.disable
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return (4 * x).sin()


@pytest.mark.slow
def test_codes_of_eager_pytorch_are_measured() -> None:
    model, x, seeds = Between(), torch.randn(128, 32), 24
    norm, variance, ours = trained(model, x, seeds, budget_bits=3, min_elements=64)
    measured = gact_fx.measure_gradient_error(ours, [x], draws=seeds).total
    assert measured.norm == pytest.approx(norm, rel=1e-4)
    assert measured.variance == pytest.approx(variance, rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_no_trace(fails: bool) -> None:
    model = Mixed(dropout=0.2)
    model.mlp.eval()
    gact_fx.compile(model, inner="eager", sample_batches=[mixed_batch(16)])
    model(*mixed_batch(16)).backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [(p.grad, p.grad.clone()) for p in model.parameters()]  # type: ignore[union-attr]
    noise, compiled, report = torch.get_rng_state(), model._compiled_call_impl, gact_fx.inspect(model)
    attributes, modes = dict(vars(model)), [module.training for module in model.modules()]
    calls = 0

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        model.mlp.train()  # type: ignore[union-attr]
        if fails and calls == 5:  # in the second batch
            raise RuntimeError("no more\nand more")
        loss: torch.Tensor = model(*batch)
        return loss

    with torch.no_grad():
        if fails:
            message = "batch 1 failed, got RuntimeError: no more; every batch must be"
            with pytest.raises(ValueError, match=message) as caught:
                gact_fx.measure_gradient_error(model, batches(2), loss_fn, draws=3)
            assert "\n" not in str(caught.value) and isinstance(caught.value.__cause__, RuntimeError)
        else:
            torch.manual_seed(5)
            noise = torch.get_rng_state()
            drawn = ((torch.randn(8, 3, 8, 8), torch.randint(0, 10, (8,))) for _ in range(2))
            assert gact_fx.measure_gradient_error(model, drawn, loss_fn, draws=3).total.variance > 0
    torch.manual_seed(5) if fails else None
    assert fails or torch.equal(noise, torch.get_rng_state())
    assert model._compiled_call_impl is compiled and dict(vars(model)) == attributes
    assert [module.training for module in model.modules()] == modes
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    for p, (grad, value) in zip(model.parameters(), grads, strict=True):
        assert p.grad is grad and torch.equal(grad, value)  # type: ignore[arg-type]
    after = gact_fx.inspect(model)
    assert after.plan is report.plan
    assert [graph.forward for graph in after.graphs] == [graph.forward for graph in report.graphs]
    model(*mixed_batch(16)).backward()
    assert len(gact_fx.inspect(model).graphs) == len(report.graphs)


def test_every_evaluation_starts_from_the_same_state() -> None:
    """Buffers as they are now, and a seed for each batch."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 64)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.layer(x).tanh() * self.scale).square().sum()

    model, reference, x, seeds = Scaled(), Scaled(), torch.randn(64, 32), []
    reference.load_state_dict(model.state_dict())
    gact_fx.compile(model, inner="eager", sample_batches=[x])

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seeds.append(torch.initial_seed())
        model.scale.add_(1)  # type: ignore[operator]
        loss: torch.Tensor = model(x)
        return loss

    record = gact_fx.measure_gradient_error(model, [x, x], loss_fn, draws=2)
    assert len(set(seeds[:3])) == len(set(seeds[3:])) == 1 and seeds[0] != seeds[3]
    assert record.total.minibatch_variance == 0 and record.total.noise is None
    assert "not known where it does not vary" in str(record)
    assert float(model.scale) == 1  # type: ignore[arg-type]
    loss_fn(reference, x).backward()
    for row, wanted in zip(record.parameters, gradients(reference), strict=True):
        assert row.norm == pytest.approx(float(wanted.norm()), rel=1e-5)


def test_parameters_that_some_batches_do_not_reach() -> None:
    """Their gradient counts as zero there; parameters never reached and leaves of others are no rows."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.idle = (nn.Linear(32, 32, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor, takes_a: bool) -> torch.Tensor:
            return (self.a if takes_a else self.b)(x.tanh()).tanh().square().sum()

    model, reference, x = Branches(), Branches(), torch.randn(64, 32, requires_grad=True)
    reference.load_state_dict(model.state_dict())
    sample = [(x, False), (x, True), (x, True)]
    gact_fx.compile(model, inner="eager", sample_batches=sample)
    rows = rows_of(gact_fx.measure_gradient_error(model, sample, draws=4))
    assert list(rows) == ["a.weight", "b.weight"]
    for layer, takes_a, share in (("a", True, 2 / 3), ("b", False, 1 / 3)):
        reference.zero_grad()
        reference(x, takes_a).backward()
        square = float(reference.get_parameter(f"{layer}.weight").grad.square().sum())  # type: ignore[union-attr]
        row = rows[f"{layer}.weight"]
        assert row.norm == pytest.approx(share * square**0.5, rel=1e-5)
        # Of a value that is there in a share of three batches, unbiased.
        assert row.minibatch_variance == pytest.approx(1.5 * share * (1 - share) * square, rel=1e-4)
        assert row.variance > 0 and row.bias < 0.1 * row.norm


@pytest.mark.slow
def test_what_is_printed() -> None:
    model = gact_fx.compile(Mixed(), inner="eager", sample_batches=[mixed_batch(16)])
    record = gact_fx.measure_gradient_error(model, batches(2), draws=3)
    lines = str(record).splitlines()
    count = len(record.parameters)
    assert len({len(line) for line in lines[: count + 2]}) == 1  # aligned
    assert lines[0].split()[:2] == ["parameter", "elements"] and lines[count + 1].startswith("total")
    assert lines[1].split()[:2] == ["conv.weight", "432"]
    assert "2 batches, of each the exact gradient and 3 compressed ones" in lines[count + 2]
    text = "\n".join(lines)
    assert " % to the variance of the minibatch gradient" in text and "the plan predicted" in text
    assert "the mean of all 6 errors is" in text
    data = json.loads(record.to_json())
    assert data["batches"] == 2 and data["draws"] == 3 and len(data["parameters"]) == count
    assert data["total"]["noise"] == record.total.noise and data["parameters"][0]["name"] == "conv.weight"
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.draws = 4  # type: ignore[misc]
    one = gact_fx.measure_gradient_error(model, batches(1), draws=2)
    assert one.total.minibatch_variance is None and "not known with one batch" in str(one)
    assert json.loads(one.to_json())["total"]["noise"] is None


def compiled() -> nn.Module:
    return gact_fx.compile(Mixed(), inner="eager", sample_batches=[mixed_batch(8)])


BATCH = mixed_batch(8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "sample", "options", "message"),
    [
        (Mixed, [BATCH], {}, "model must be a module compiled by gact_fx.compile, got Mixed, which was not"),
        (lambda: 3, [BATCH], {}, "model must be a module compiled by gact_fx.compile, got int"),
        (lambda: gact_fx.compile(lambda x: x, inner="eager"), [BATCH], {}, "model must be a torch.nn.Module"),
        (lambda: gact_fx.compile(Mixed(), budget_bits=None), [BATCH], {}, "got budget_bits=None"),
        (lambda: gact_fx.compile(Mixed(), inner="eager"), [BATCH], {}, "model must have a plan, got one without"),
        (compiled, [BATCH], {"draws": 1}, "draws must be a whole number of at least 2, got 1"),
        (compiled, [BATCH], {"draws": 2.0}, r"draws must be a whole number of at least 2, got 2\.0"),
        (compiled, [], {}, "batches is empty, got no batch"),
        (compiled, BATCH[0], {}, "batches must be an iterable of batches, got one Tensor"),
        (compiled, [(torch.zeros(2, 5),)], {}, "batch 0 failed, got TypeError"),
        (compiled, [BATCH], {"loss_fn": lambda m, b: m.conv(b[0])}, "must return a scalar tensor, got a tensor of"),
        (compiled, [BATCH], {"loss_fn": lambda m, b: 3.0}, "must return a scalar tensor, got float"),
        (compiled, [BATCH], {"loss_fn": lambda m, b: m(*b).detach()}, "the loss has no gradient"),
        (compiled, [BATCH], {"loss_fn": lambda m, b: m(*b) * float("nan")}, "must be finite .* got nan"),
        (compiled, [BATCH], {"loss_fn": lambda m, b: m.head.weight.sum()}, "captured no graph with a gradient"),
    ],
)
def test_errors(make: Callable[[], Any], sample: Any, options: dict[str, Any], message: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=message) as caught:
        gact_fx.measure_gradient_error(model, sample, **options)
    text = str(caught.value)
    assert text.startswith("gact_fx.measure_gradient_error: ") and "\n" not in text and "; " in text


def test_a_loss_that_is_another_at_each_call() -> None:
    count = itertools.count(1)
    with pytest.raises(ValueError, match=r"loss of batch 0 must be finite and the same .* got .* and then"):
        gact_fx.measure_gradient_error(compiled(), [BATCH], lambda m, b: m(*b) * next(count))
