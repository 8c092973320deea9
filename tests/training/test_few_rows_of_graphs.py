"""Models with graph breaks are profiled on a few rows, too: the same ones in every graph, whose gradients flow on."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import gradients, relative_error
from test_few_rows import LOSSES, held_bytes
from torch import nn
from torch.nn import functional as F

import gact_fx
from gact_fx.profiling import few_rows
from gact_fx.profiling.few_rows_step import FewRowsStep
from gact_fx.profiling.tape import Step
from gact_fx.training import row_tracing
from gact_fx.training.session import Session

ROWS, LENGTH, WIDTH, BATCHES = 64, 16, 32, 4
pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="with torch 2.11 sizes vary in the first graph alone, and 2.12 was not tried"
)


@pytest.fixture(autouse=True)
def small_graphs_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tracing, "ENOUGH_NBYTES", 2**13)
    # Of two rows of so few elements groups hold too much of a tensor.
    monkeypatch.setattr(few_rows, "ENOUGH_NBYTES", 2**15)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The graphs of every step that is profiled on a few rows."""
    found: list[int] = []
    recordings = FewRowsStep.recordings

    def noted(self: FewRowsStep, parts: int) -> object:
        found.append(len(self))
        return recordings(self, parts)

    monkeypatch.setattr(FewRowsStep, "recordings", noted)
    return found


@torch.compiler.disable
def scaled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """What runs in eager PyTorch."""
    return x * by


class Broken(nn.Module):
    """Three graphs, the loss in the last one if ``reduce`` says how; ``way``: from the first to the second."""

    def __init__(self, reduce: str = "", way: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.by, self.reduce, self.way = nn.Parameter(torch.ones(WIDTH)), reduce, way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.b(F.gelu(self.a(x))))
        scores = hidden[..., :4].exp()
        if self.way == "rows last":
            hidden, scores = hidden.transpose(0, 1).square(), scores.transpose(0, 1).square()
        if self.way == "flat":
            hidden, scores = (part.transpose(0, 1).flatten(0, 1).square() for part in (hidden, scores))
        more = scores
        if self.way == "other rows":
            more = scores.flatten(0, 1).exp()
        if self.way == "view":
            more = hidden.unsqueeze(1)
        torch._dynamo.graph_break()
        if self.way == "view":
            hidden = hidden + more.squeeze(1)
        if self.way == "eager":
            hidden = scaled(hidden, self.by)
        if self.way == "other rows":
            hidden = hidden + more.mean()
        hidden = torch.tanh(self.c(F.layer_norm(hidden, (WIDTH,)))) * scores.mean(-1, keepdim=True).cos()
        extra = hidden.mean() if self.way == "sum of rows" else None
        torch._dynamo.graph_break()
        losses = (self.c(hidden).softmax(-1).cumsum(-1) - 0.5).square()
        losses = losses if extra is None else losses + extra
        return getattr(losses, self.reduce)() if self.reduce else losses


def variance_of(model: nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor], seed: int = 1) -> float:
    gact_fx.compile(model, inner="eager", min_elements=64)
    torch.manual_seed(seed)
    loss_of(model(2 * torch.randn(ROWS, LENGTH, WIDTH))).backward()
    plan = gact_fx.inspect(model).plan
    assert plan is not None and plan.variance is not None
    return plan.variance


def mean_variance(reduce: str, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """That of some batches: found on one of them, it differs by a tenth from processor to processor."""
    return sum(variance_of(Broken(reduce), loss_of, seed) for seed in range(BATCHES)) / BATCHES


@pytest.mark.parametrize(
    "name", ["mean inside", "sum behind", *(pytest.param(each, marks=pytest.mark.slow) for each in list(LOSSES)[1:3])]
)
def test_the_variance_is_that_of_the_whole_batch(name: str, cut: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a mean inside counts each of a few rows for more, and the tangents of other graphs do not."""
    reduce, loss_of = LOSSES[name]
    few = mean_variance(reduce, loss_of)
    assert cut == [3] * BATCHES
    monkeypatch.setattr(few_rows, "ENOUGH_NBYTES", 2**30)
    assert few == pytest.approx(mean_variance(reduce, loss_of), rel=0.15) and len(cut) == BATCHES


@pytest.mark.parametrize("way", ["eager", "view", "flat", "rows last", "other rows", "sum of rows"])
def test_what_nobody_can_follow_is_profiled_whole(way: str, cut: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """Operators between graphs, and what has no rows, or not first and apart: flattened ones are in any order."""
    model = Broken("mean", way)
    gact_fx.compile(model, inner="eager", min_elements=64)
    for _ in range(3):
        model(torch.randn(ROWS, LENGTH, WIDTH)).backward()
    assert not cut and gact_fx.inspect(model).ratio > 2 and "failed" not in caplog.text


def test_a_step_that_cannot_be_measured_on_a_few_rows_is_profiled_whole(
    cut: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Session.measure

    def fails(self: Session, steps: Sequence[Step], bar: object = None) -> object:
        if steps[0].weight != 1:
            raise RuntimeError("of a few rows")
        return measure(self, steps, bar)

    monkeypatch.setattr(Session, "measure", fails)
    model = Broken("mean")
    gact_fx.compile(model, inner="eager", min_elements=64)
    for _ in range(3):
        model(torch.randn(ROWS, LENGTH, WIDTH)).backward()
    assert cut == [3] and gact_fx.inspect(model).ratio > 2


def test_a_graph_whose_result_the_loss_ignores_is_left_out(cut: list[int]) -> None:
    class Ignored(Broken):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = F.gelu(self.b(F.gelu(self.a(x))))
            torch._dynamo.graph_break()
            self.seen = self.c(hidden).exp()
            torch._dynamo.graph_break()
            return self.c(hidden).softmax(-1).square().mean()

    model = Ignored()
    gact_fx.compile(model, inner="eager", min_elements=64)
    for _ in range(2):
        model(torch.randn(ROWS, LENGTH, WIDTH)).backward()
    assert gact_fx.inspect(model).plan is not None and cut == [3]


def test_gradients_between_graphs_are_no_gradients_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[float] = []
    learn = Session.learn

    def noted(self: Session, recordings: Any, variance: float | None = None, squared_norm: float | None = None) -> None:
        assert squared_norm is not None
        found.append(squared_norm)
        learn(self, recordings, variance, squared_norm)

    monkeypatch.setattr(Session, "learn", noted)
    model = Broken("sum")
    variance_of(model, lambda y: y)
    assert found == [pytest.approx(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))]


def test_what_waits_to_be_profiled_is_a_few_rows() -> None:
    model, x = Broken("mean"), torch.randn(4096, LENGTH, WIDTH)
    gact_fx.compile(model, inner="eager", min_elements=64)
    before = held_bytes()
    model(x).backward()
    model.zero_grad()
    assert held_bytes() - before < 0.1 * x.nbytes
    assert gact_fx.inspect(model).plan is not None


def test_a_forward_pass_without_backward_holds_nothing() -> None:
    """Neither the batch nor, by autograd's nodes, what was saved."""
    model, x = Broken(), torch.randn(ROWS, LENGTH, WIDTH)
    gact_fx.compile(model, inner="eager", min_elements=64)
    result = model(x)
    batch, node = weakref.ref(x), weakref.ref(result.grad_fn)
    del x, result
    gc.collect()
    assert batch() is None and node() is None


def test_forward_passes_without_backward_give_way(cut: list[int]) -> None:
    model = Broken("mean")
    gact_fx.compile(model, inner="eager", min_elements=64)
    model(torch.randn(ROWS, LENGTH, WIDTH))
    for _ in range(2):
        model(torch.randn(ROWS, LENGTH, WIDTH)).backward()
    assert gact_fx.inspect(model).plan is not None and cut == [3]


def test_two_runs_in_one_step_are_profiled_whole(cut: list[int]) -> None:
    model, exact = Broken("mean"), Broken("mean")
    gact_fx.compile(model, inner="eager", min_elements=64, budget_bits=8)
    for _ in range(3):
        first, second = torch.randn(2, ROWS, LENGTH, WIDTH)
        for each in (model, exact):
            each.zero_grad()
            (each(first) + each(second)).backward()
        assert relative_error(gradients(model), gradients(exact)) < 0.1
    assert not cut and gact_fx.inspect(model).ratio > 2


def test_a_graph_of_parameters_alone_is_profiled_whole(cut: list[int], caplog: pytest.LogCaptureFixture) -> None:
    class Regularized(Broken):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.b(F.gelu(self.a(x)))
            torch._dynamo.graph_break()
            squares = self.c.weight.square().exp()
            torch._dynamo.graph_break()
            return (hidden.tanh() @ squares).square().mean()

    model = Regularized()
    gact_fx.compile(model, inner="eager", min_elements=64)
    for _ in range(3):
        model(torch.randn(ROWS, LENGTH, WIDTH)).backward()
    assert not cut and gact_fx.inspect(model).ratio > 2 and "failed" not in caplog.text
