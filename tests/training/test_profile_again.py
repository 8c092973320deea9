"""Profiling during training, and budgets that need the minibatch variance."""

import logging

import pytest
import torch
from conftest import Mixed, gradients, mixed_batch, relative_error
from torch import nn

import gact_fx
from gact_fx.training.backend import Backend


def plan_of(model: nn.Module) -> gact_fx.Plan:
    plan = gact_fx.inspect(model).plan
    assert plan is not None
    return plan


@pytest.mark.parametrize("inner", ["inductor", "eager"])
def test_the_plan_follows_the_sensitivities(inner: str) -> None:
    """The head's weight grows a thousandfold: what it multiplies matters more than before, and gets more bits."""
    torch.manual_seed(0)
    model, reference = Mixed(), Mixed()
    gact_fx.compile(model, inner=inner, budget_bits=4, profile_every=2)
    plans, names = [], []
    for step in range(7):
        if step == 2:
            with torch.no_grad():
                model.mlp[3].weight.mul_(100)  # type: ignore[operator]
        batch = mixed_batch(16)
        reference.load_state_dict(model.state_dict())
        model(*batch).backward()
        reference(*batch).backward()
        assert relative_error(gradients(model), gradients(reference)) < 0.3
        plans.append(gact_fx.inspect(model).plan)
        names.append(len(gact_fx.inspect(model).rows))
    assert plans[0] is not None and plans[-1] is not None
    assert plans[0].choices() != plans[-1].choices()
    # Two steps in a row on one batch: what they differ by is noise of compression alone, which is taken out.
    assert plans[-1].minibatch_variance is not None


def test_a_plan_that_would_be_the_same_is_not_compiled_again() -> None:
    torch.manual_seed(0)
    model = gact_fx.compile(Mixed(), inner="eager", budget_bits=4, profile_every=1)
    batch = mixed_batch(16)
    for _ in range(3):
        model(*batch).backward()
    choices, graphs = plan_of(model).choices(), gact_fx.inspect(model).graphs
    for _ in range(3):
        model(*batch).backward()
    assert plan_of(model).choices() == choices
    assert all(a.backward is b.backward for a, b in zip(gact_fx.inspect(model).graphs, graphs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [True, False])
def test_a_bound_on_the_noise_is_met(sampled: bool) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(16, 3, 8, 8), torch.randint(0, 10, (16,))) for _ in range(3)]
    bytes_held = []
    for limit in (0.5, 0.01):
        samples = {"sample_batches": batches} if sampled else {}
        model = gact_fx.compile(Mixed(), inner="eager", max_gradient_noise=limit, **samples)  # type: ignore[arg-type]
        for batch in batches:
            model(*batch).backward()
        plan = plan_of(model)
        assert plan.variance is not None and plan.minibatch_variance is not None
        assert 0 < plan.variance <= limit * plan.minibatch_variance * (1 + 1e-9)
        bytes_held.append(gact_fx.inspect(model).bytes_after)
    assert bytes_held[0] < bytes_held[1]


def test_one_batch_is_halved_for_the_minibatch_variance() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    x, t = torch.randn(512, 16), torch.randn(512, 8)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (model(batch[0]) - batch[1]).square().sum(1).mean()

    rows = []
    for i in range(512):
        grads = torch.autograd.grad(loss(model, (x[i : i + 1], t[i : i + 1])), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    wanted = float(torch.stack(rows).double().var(0).sum()) / 512
    gact_fx.compile(model, inner="eager", sample_batches=[(x, t)], loss_fn=loss)
    assert plan_of(model).minibatch_variance == pytest.approx(wanted, rel=0.3)


def test_too_much_noise_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Many rows make a gradient that hardly varies; rounding to a bit does."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8)), torch.randn(4096, 16)
    with caplog.at_level(logging.WARNING, "gact_fx"):
        gact_fx.compile(
            model, inner="eager", budget_bits=1.3, sample_batches=[x], loss_fn=lambda m, b: m(b).square().mean()
        )
    assert "to the variance of the minibatch gradient, more than 10 %; budget_bits=" in caplog.text


@pytest.mark.slow
def test_profiled_on_few_rows_and_trained_on_many(caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo then traces the model again with a varying batch size, which may cut it a little differently."""
    torch.manual_seed(0)
    model, reference = Mixed(), Mixed()
    gact_fx.compile(model, budget_bits=4, sample_batches=[mixed_batch(4)])
    reference.load_state_dict(model.state_dict())
    batch = mixed_batch(32)
    with caplog.at_level(logging.WARNING, "gact_fx"):
        model(*batch).backward()
    reference(*batch).backward()
    assert relative_error(gradients(model), gradients(reference)) < 0.2
    assert "all its tensors get one width" not in caplog.text
    assert len({row.bits for row in gact_fx.inspect(model).rows if row.encoding == "quantize"}) > 2


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [False, True])
def test_a_bound_on_the_noise_is_met_where_batches_vary_in_size(breaks: bool) -> None:
    """The gradients of the parameters compare whatever the batch; the variance is that of sample batches."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.a(x)) / 100
            if breaks:
                torch._dynamo.graph_break()
            loss: torch.Tensor = (self.b(h) * 100).square().mean()
            return loss

    batches = [torch.randn(rows, 64) for rows in (256, 200)]
    found = []
    for samples in ({"sample_batches": batches}, {}):
        torch.manual_seed(0)
        model = gact_fx.compile(Net(), inner="eager", min_elements=64, max_gradient_noise=0.1, **samples)  # type: ignore[arg-type]
        for batch in batches:
            model(batch).backward()
        plan = plan_of(model)
        found.append(plan.minibatch_variance)
        assert plan.variance is not None and plan.minibatch_variance is not None
        assert 0 < plan.variance <= 0.1 * plan.minibatch_variance * (1 + 1e-9)
    assert found[1] == pytest.approx(found[0], rel=0.01)


def test_gradients_that_never_compare_fall_back_to_the_usual_budget(caplog: pytest.LogCaptureFixture) -> None:
    """Every step trains another half of the model."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.halves = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])

        def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
            return torch.tanh(self.halves[odd](x)).square().mean()

    model = gact_fx.compile(Halves(), inner="eager", min_elements=64, max_gradient_noise=0.1)
    with caplog.at_level(logging.WARNING, "gact_fx"):
        for step in range(8):
            assert gact_fx.inspect(model).plan is None
            model(torch.randn(64, 64), step % 2 == 1).backward()
    assert plan_of(model).graphs and "max_gradient_noise=0.1 cannot be kept" in caplog.text


class Relus(nn.Module):
    """Scaled, so that the gradient is as large in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)]), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) * 1.4
        return self.head(x).square().mean()


@pytest.mark.parametrize("form", ["module", "function"])
@pytest.mark.parametrize("inner", ["inductor", "eager"])
def test_profiling_again_on_the_same_weights_gives_the_same_sensitivities(
    inner: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the steps between store one or two bits, whose codes would tell nothing; and it compiles once."""
    torch.manual_seed(0)
    model, x, compilations = Relus(), torch.randn(512, 64), []
    exact = torch.autograd.grad(model(x), list(model.parameters()))
    call = Backend.__call__
    monkeypatch.setattr(Backend, "__call__", lambda self, *args: (compilations.append(1), call(self, *args))[1])  # type: ignore[func-returns-value]
    options = {"inner": inner, "min_elements": 64, "budget_bits": 1.5, "profile_every": 3}
    # A function finds the module in its closure.
    target = model if form == "module" else lambda x: model(x)
    compiled = gact_fx.compile(target, sample_batches=[x], **options)  # type: ignore[arg-type]
    session = compiled._gact_fx_session  # type: ignore[attr-defined]
    before, counts, errors = session.plan, [], []
    for _ in range(9):
        compiled(x).backward()  # type: ignore[no-untyped-call]
        errors.append(relative_error(gradients(model), exact))
        counts.append(len(compilations))
    again = [profile.tensors().sensitivities for profile in session.profiles.values()]
    for entry, sensitivity in zip(before.graphs[0].tensors, again[0].values(), strict=True):
        assert sensitivity.value == pytest.approx(entry.sensitivity, rel=1e-3)
    assert session.plan.choices() == before.choices()
    # The sample, the plan, and the first step that is profiled again.
    assert counts == [2, 2] + [3] * 7
    assert all((error < 0.03) == (number % 3 == 0) for number, error in enumerate(errors, start=1))


def test_the_minibatch_variance_is_free_of_the_noise_of_the_plan() -> None:
    """Of the two steps that tell, one ran the plan and one did not; as far as the plan's own prediction is right."""
    torch.manual_seed(0)
    model, batches = Relus(), torch.randn(2, 512, 64)
    exact = [torch.autograd.grad(model(x), list(model.parameters())) for x in batches]
    wanted = sum(float((a - b).square().sum()) for a, b in zip(*exact, strict=True)) / 2
    options = {"budget_bits": 1.5, "profile_every": 2, "recompute": "off", "rounding": "stochastic"}
    gact_fx.compile(model, inner="eager", min_elements=64, sample_batches=[batches[0]], **options)  # type: ignore[arg-type]
    noise = plan_of(model).variance
    assert noise is not None and noise > 0.5 * wanted
    for x in batches:
        model(x).backward()
        model.zero_grad()
    assert plan_of(model).minibatch_variance == pytest.approx(wanted, rel=0.2)


def test_a_bound_on_the_noise_holds_while_gradients_vary_more_and_less() -> None:
    """More bits where batches are nearly the same, and their gradients too, and fewer where they differ again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))
    gact_fx.compile(model, inner="eager", max_gradient_noise=1e-3, profile_every=2)
    common, held = torch.randn(256, 64), []
    for share in (1.0, 0.1, 1.0):
        for _ in range(6):
            model(common + share * torch.randn(256, 64)).square().mean().backward()
        plan = plan_of(model)
        assert plan.variance is not None and plan.minibatch_variance is not None
        assert plan.variance <= 1e-3 * plan.minibatch_variance * 1.05
        held.append(gact_fx.inspect(model).bytes_after)
    assert held[1] > 1.2 * held[0]
    assert held[2] < held[1] / 1.2
