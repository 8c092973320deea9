"""Operators that run in eager PyTorch between the compiled graphs of one model."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gact_fx
from gact_fx.config import Config
from gact_fx.profiling.measure_sensitivity import measure_sensitivity
from gact_fx.profiling.measure_step import measure_step
from gact_fx.profiling.tape import Step
from gact_fx.training.session import Session

X = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))


@torch.compiler.disable
def times_ten_of_sine(h: torch.Tensor) -> torch.Tensor:
    return torch.sin(h) * 10


@torch.compiler.disable
def times_ten_in_place(h: torch.Tensor) -> torch.Tensor:
    return h.mul_(10)


@torch.compiler.disable
def nothing(h: torch.Tensor) -> torch.Tensor:
    return h.view_as(h)


class Net(nn.Module):
    def __init__(self, between: object) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(64, 64), nn.Linear(64, 64), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x)) * 2
        if self.between is torch._dynamo.graph_break:
            torch._dynamo.graph_break()  # type: ignore[operator]
        else:
            h = self.between(h)  # type: ignore[operator]
        loss: torch.Tensor = torch.tanh(self.b(h) / 10).square().sum()
        return loss


def recorded(model: nn.Module) -> list[Step]:
    """The step that was profiled."""
    found: list[list[Step]] = []

    class Watched(Session):
        def measure(self, steps, bar=None):  # type: ignore[no-untyped-def]
            found.append(list(steps))
            return super().measure(steps, bar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gact_fx.api.Session", Watched)
        gact_fx.compile(model, inner="eager", min_elements=64, sample_batches=[X])
    return found[0]


def flows(between: object) -> int:
    """Gradients that one graph hands to an earlier one, as they are."""
    return sum(len(step.flows) for step in recorded(Net(between)))


def ends(step: Step) -> list[set[object]]:
    """Where the gradients of a step's inputs end that eager PyTorch computed."""
    return [{"leaf" if end.is_leaf else end.of for end in detour.ends} for detour in step.detours.values()]


class Weighted(nn.Module):
    """Eager PyTorch, with a parameter of its own, between two graphs where ``is_broken``."""

    def __init__(self, is_broken: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.between = torch.compiler.disable(self.mix) if is_broken else self.mix

    def mix(self, h: torch.Tensor) -> torch.Tensor:
        return torch.sin(10 * h) @ self.weight + h.cumsum(1) / 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.between(torch.tanh(self.a(x)) * 2)
        loss: torch.Tensor = torch.sigmoid(torch.tanh(self.b(h) / 10) * 3).square().sum()
        return loss


def test_a_gradient_is_followed_through_eager_operators(caplog: pytest.LogCaptureFixture) -> None:
    """To the parameters of the graph before, and to those of the eager part; the oracles are Algorithm 1, and the same
    network in one graph.
    """
    with caplog.at_level(logging.WARNING, "gact_fx"):
        broken, whole = recorded(Weighted(True)), recorded(Weighted(False))
    assert "reads the" not in caplog.text
    assert ends(broken[1]) == [{(0, "tangents_1"), "leaf"}]
    with torch.no_grad():
        adjoint = measure_step(broken, Config(profile_draws=32))
        empirical = measure_sensitivity(broken, draws=32)
        (reference,) = measure_step(whole, Config(profile_draws=32))
    for found, expected in zip(adjoint, empirical, strict=True):
        assert found
        for name, value in expected.items():
            assert found[name].value == pytest.approx(value, rel=0.15)
    (name,) = (t.name for t in broken[1].analysis.saved if t.key == "aten.tanh#0")
    (same,) = (t.name for t in whole[0].analysis.saved if t.key == "aten.tanh#1")
    assert adjoint[1][name].value == pytest.approx(reference[same].value, rel=0.15)


class Rounded(torch.autograd.Function):
    """Its backward could do anything."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.variable = 10
        return x * 10

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient * 10


@torch.compiler.disable
def by_a_function(h: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Rounded.apply(h)  # type: ignore[no-untyped-call]
    return found


@pytest.mark.parametrize(
    ("between", "node"), [(by_a_function, "RoundedBackward"), (times_ten_in_place, "MulBackward0")]
)
def test_what_cannot_be_followed_is_named(between: object, node: str, caplog: pytest.LogCaptureFixture) -> None:
    """A custom function may do anything in backward, and of a graph's result that was written to, autograd says no more
    where it came from.
    """
    with caplog.at_level(logging.WARNING, "gact_fx"):
        steps = recorded(Net(between))
    assert not any(step.flows or step.detours for step in steps)
    assert f"graph 1 reads the (256, 64) result of {node}" in caplog.text


class Skipping(Net):
    """Eager PyTorch reads two graphs' results, one of which comes from the other, and a parameter of the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.a(x))
        torch._dynamo.graph_break()
        second = torch.tanh(self.b(first))
        return torch.tanh(self.mix(first, second)).square().sum()

    @torch.compiler.disable
    def mix(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * b @ self.a.weight


def test_a_graph_on_the_way_from_another_is_not_run(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gact_fx"):
        steps = recorded(Skipping(None))
    assert "reads the" not in caplog.text
    assert [len(step.flows) for step in steps] == [0, 1, 0]
    assert ends(steps[2]) == [{(0, "tangents_1"), (1, "tangents_1"), "leaf"}]
    check_against_algorithm_1(steps)


def check_against_algorithm_1(steps: list[Step]) -> None:
    with torch.no_grad():
        adjoint = measure_step(steps, Config(profile_draws=64))
        empirical = measure_sensitivity(steps, draws=64)
    for found, expected in zip(adjoint, empirical, strict=True):
        for name, value in expected.items():
            assert found[name].value == pytest.approx(value, rel=0.2), name


@torch.compiler.disable
def plus_one(h: torch.Tensor) -> torch.Tensor:
    return h + 1


@torch.compiler.disable
def with_itself(h: torch.Tensor) -> torch.Tensor:
    return h + h[:1] * h.mean()


@pytest.mark.parametrize("between", [plus_one, with_itself, times_ten_of_sine])
def test_operators_that_hand_gradients_on_add_them_up_or_broadcast(between: object) -> None:
    steps = recorded(Net(between))
    assert ends(steps[1]) == [{(0, "tangents_1")}]
    check_against_algorithm_1(steps)


def test_one_parameter_in_several_results() -> None:
    """Their parts of its gradient add up, and may cancel."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        @torch.compiler.disable
        def both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = x @ self.weight / 8
            return h, 0.5 - h

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, other = self.both(x)
            return (torch.tanh(one) * torch.tanh(other)).sum()

    (step,) = steps = recorded(Twice())
    one, other = (detour.ends for detour in step.detours.values())
    assert [end.of for end in one] == [end.of for end in other]
    check_against_algorithm_1(steps)


def test_a_view_in_a_results_place_is_no_identity() -> None:
    @torch.compiler.disable
    def turned(h: torch.Tensor) -> torch.Tensor:
        return h[:64].t()

    @torch.compiler.disable
    def copied(h: torch.Tensor) -> torch.Tensor:
        return h[:64].t().clone()

    values = []
    for between in (turned, copied):
        steps = recorded(Net(between))
        assert not steps[1].flows and ends(steps[1]) == [{(0, "tangents_1")}]
        with torch.no_grad():
            values.append([s.value for s in measure_step(steps, Config(profile_draws=8))[1].values()])
    assert values[0] == pytest.approx(values[1], rel=0.3)


@torch.compiler.disable
def by_attention(h: torch.Tensor) -> torch.Tensor:
    """On the CPU without a second derivative."""
    q = h.view(1, 4, 64, 64)
    return nn.functional.scaled_dot_product_attention(q, q, q).view(256, 64)


@torch.compiler.disable
def by_a_scaled_view(h: torch.Tensor) -> torch.Tensor:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return -0.01 * gradient

    found: torch.Tensor = Scale.apply(h)  # type: ignore[no-untyped-call]
    return found


@pytest.mark.parametrize("between", [by_attention, by_a_scaled_view])
def test_what_cannot_be_followed_is_planned_all_the_same(between: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gact_fx"):
        steps = recorded(Net(between))
    assert not any(step.flows or step.detours for step in steps)
    assert "graph 1 reads the (256, 64) result of" in caplog.text


def test_a_sparse_gradient_is_not_followed() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.a = nn.Embedding(100, 64, sparse=True), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.a(self.rows(x))).square().sum()

        @torch.compiler.disable
        def rows(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x.long() % 100)[:, 0]

    (step,) = recorded(Embedded())
    assert not step.detours


def test_hooks_of_the_user_see_backward_passes_alone() -> None:
    """Not what profiling asks: no calls, no ``.grad``, no second run of what is checkpointed; nor do they count as
    derivatives.
    """
    seen: list[float] = []
    runs: list[int] = []
    kept: list[torch.Tensor] = []

    def wave(h: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return torch.sin(h)

    @torch.compiler.disable
    def hooked(h: torch.Tensor) -> torch.Tensor:
        h = torch.sin(h)
        h.register_hook(lambda g: seen.append(float(g.norm())))
        h.retain_grad()
        kept.append(h)
        return h * 2

    @torch.compiler.disable
    def checkpointed(h: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(wave, h, use_reentrant=False)
        return found

    model = gact_fx.compile(Net(hooked), inner="eager", min_elements=64)
    loss = model(X)
    assert not seen and kept[0].grad is None
    loss.backward()
    assert len(seen) == 1 and seen[0] > 0
    assert kept[0].grad is not None and not kept[0].grad.requires_grad
    model = gact_fx.compile(Net(checkpointed), inner="eager", min_elements=64)
    loss = model(X)
    assert len(runs) == 1
    loss.backward()
    assert len(runs) == 2 and gact_fx.inspect(model).plan is not None


def test_where_hooks_are_forbidden_nothing_is_followed() -> None:
    model = gact_fx.compile(Net(times_ten_of_sine), inner="eager", min_elements=64)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        loss = model(X)
    loss.backward()
    assert gact_fx.inspect(model).plan is not None


@pytest.mark.parametrize("sensitivity", ["adjoint", "empirical"])
def test_a_graph_that_runs_more_often_than_is_recorded(sensitivity: str) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 64)

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.a(x))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(10):
                x = times_ten_of_sine(self.step(x))
            return x.square().sum()

    model = gact_fx.compile(Loop(), inner="eager", min_elements=64, sensitivity=sensitivity, sample_batches=[X])
    assert gact_fx.inspect(model).plan is not None


def test_a_gradient_is_followed_to_parameters_before_the_first_graph() -> None:
    class Late(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.b(self.eager(x))).square().sum()

        @torch.compiler.disable
        def eager(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.a(x)) * 3

    (step,) = recorded(Late(None))
    assert [len(detour.ends) for detour in step.detours.values()] == [2] and ends(step) == [{"leaf"}]


def test_profiling_is_no_backward_pass_of_the_eager_part() -> None:
    """Of several forward passes in one step, all are counted that hold something for backward."""
    model = gact_fx.compile(Net(times_ten_of_sine), inner="eager", min_elements=64, budget_bits=4)
    for _ in range(3):
        (model(X) + model(X)).backward()
    rows = [row for row in gact_fx.inspect(model).rows if row.graph is None]
    one = gact_fx.compile(Net(times_ten_of_sine), inner="eager", min_elements=64, budget_bits=4)
    for _ in range(3):
        one(X).backward()
    assert len(rows) == 2 * len([row for row in gact_fx.inspect(one).rows if row.graph is None]) > 0


def test_a_gradient_is_followed_where_nothing_is_computed_between(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gact_fx"):
        assert flows(torch._dynamo.graph_break) == 1
        assert ends(recorded(Net(nothing))[1]) == [{(0, "tangents_1")}]
    assert "reads the" not in caplog.text


def test_a_detached_activation_ends_the_gradient() -> None:
    """What is made a leaf of its own between graphs has no gradient to pass on, though it keeps its address."""

    @torch.compiler.disable
    def cut(h: torch.Tensor) -> torch.Tensor:
        return h.detach().requires_grad_()

    assert flows(cut) == 0


@pytest.mark.parametrize("inner", ["inductor", "eager"])
def test_a_graphs_result_may_be_written_to(inner: str) -> None:
    """A linear layer's result is a view of a matrix product where operators run one by one, and none when compiled."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
            self.mask = nn.Parameter(torch.randn(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.layer_norm(x, (64,))
            h = self.a(x)
            torch._dynamo.graph_break()
            h[torch.arange(256).view(4, 64) % 3 == 0] = self.mask
            return torch.tanh(self.b(h) + x).square().sum()

    x = X.view(4, 64, 64)
    model, exact = Masked(), Masked()
    gact_fx.compile(model, inner=inner, min_elements=64, budget_bits=8)
    exact(x).backward()
    for _ in range(2):
        model.zero_grad()
        model(x).backward()
        for found, expected in zip(model.parameters(), exact.parameters(), strict=True):
            assert found.grad is not None and expected.grad is not None
            assert (found.grad - expected.grad).norm() < 0.02 * expected.grad.norm()
