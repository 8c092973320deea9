"""Large graphs are profiled on a few rows of the batch, in less memory and with the same plan."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import gradients, relative_error
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gact_fx
from gact_fx.graphs.edit import copy_module
from gact_fx.profiling import few_rows, narrow_codes
from gact_fx.profiling.few_rows_step import FewRowsStep
from gact_fx.profiling.measure_plan import PlanMeter
from gact_fx.training import row_tracing
from gact_fx.training.model import session_of

ROWS, WIDTH = 64, 48


class Net(nn.Module):
    """What bends, a mask, dropout and statistics of rows, and a loss of its own if ``reduce`` says how."""

    def __init__(self, reduce: str = "") -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.drop, self.reduce = nn.LayerNorm(WIDTH), nn.Dropout(0.1), reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(F.gelu(self.a(x)))
        hidden = self.c(F.relu(self.b(self.norm(hidden)))).softmax(-1)
        losses = (hidden.cumsum(-1) - 0.5).square()
        return getattr(losses, self.reduce)() if self.reduce else losses


@pytest.fixture(autouse=True)
def small_graphs_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (few_rows, row_tracing):
        monkeypatch.setattr(module, "ENOUGH_NBYTES", 2**13)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of every step that is profiled on a few rows, how many of how many."""
    found: list[tuple[int, int]] = []
    recordings = FewRowsStep.recordings

    def noted(self: FewRowsStep, parts: int) -> object:
        found.append(*{(few.few, few.rows) for few in self._graphs.values()})
        return recordings(self, parts)

    monkeypatch.setattr(FewRowsStep, "recordings", noted)
    return found


def compiled(model: nn.Module, **options: object) -> nn.Module:
    return gact_fx.compile(model, inner="eager", min_elements=64, **options)  # type: ignore[arg-type]


def without_dropout() -> tuple[Net, Net]:
    """A network with a loss of its own, and a copy to compare gradients with."""
    torch.manual_seed(0)
    model = Net("mean")
    model.drop.p = 0.0
    return model, copy.deepcopy(model)


def variance(model: nn.Module) -> float:
    plan = gact_fx.inspect(model).plan
    assert plan is not None and plan.variance is not None
    return plan.variance


def held_bytes() -> int:
    """Of all storages that Python objects hold."""
    gc.collect()
    # Fake tensors have no bytes.
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


# The loss inside of the model, or behind it.
LOSSES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "mean inside": ("mean", lambda y: y),
    "sum inside": ("sum", lambda y: y),
    "mean behind": ("", torch.Tensor.mean),
    "sum behind": ("", torch.Tensor.sum),
}


@pytest.mark.parametrize(
    "name",
    [
        "mean inside",
        "sum behind",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("sum inside", "mean behind")),
    ],
)
def test_the_variance_is_that_of_the_whole_batch(name: str, cut: list[tuple[int, int]]) -> None:
    reduce, loss_of = LOSSES[name]
    torch.manual_seed(0)
    x = torch.randn(ROWS, 32, WIDTH)
    few, whole = Net(reduce), Net(reduce)
    whole.load_state_dict(few.state_dict())
    # Sizes that never vary leave nothing to cut by.
    for model, options in ((few, {}), (whole, {"dynamic": False})):
        compiled(model, **options)
        loss_of(model(x)).backward()
    assert variance(few) == pytest.approx(variance(whole), rel=0.3)
    assert cut == [(2, ROWS)]
    error = gact_fx.measure_gradient_error(few, [x], lambda model, batch: loss_of(model(batch)))
    assert sum(of.variance + of.bias_estimate**2 for of in error.parameters) < 2 * variance(few)


def test_the_step_itself_leaves_no_trace(cut: list[tuple[int, int]]) -> None:
    """Neither in buffers nor random numbers, nor on the batch; and its gradient is of the whole batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(8, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 8, 1))
    exact, x = copy.deepcopy(model), torch.randn(ROWS, 8, WIDTH)
    compiled(model, budget_bits=8)
    for net in (model, exact):
        net(x).square().mean().backward()
    state = torch.get_rng_state()
    assert gact_fx.inspect(model).plan is not None and cut
    assert torch.equal(torch.get_rng_state(), state)
    assert relative_error(gradients(model), gradients(exact)) < 0.02
    torch.testing.assert_close(dict(model.named_buffers()), dict(exact.named_buffers()))
    assert not [name for name in vars(x) if "dynamo" in name]


@pytest.mark.parametrize(("length", "few"), [(49, 2), (47, 3)])
def test_a_batch_norm_has_enough_elements(length: int, few: int, cut: list[tuple[int, int]]) -> None:
    """Two rows of 49 are two images of ResNet-50 at 224 x 224 pixels in its last stage."""
    model = compiled(nn.Sequential(nn.Conv1d(8, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 8, 1)))
    for _ in range(2):
        model(torch.randn(ROWS, 8, length)).square().mean().backward()
    assert cut == [(few, ROWS)]


def test_planned_graphs_are_those_of_the_profile(caplog: pytest.LogCaptureFixture, cut: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    model = compiled(Net("mean"))
    for _ in range(3):
        model(torch.randn(ROWS, 4, WIDTH)).backward()
    assert "not profiled" not in caplog.text and len(cut) == 1
    rows = [row for row in gact_fx.inspect(model).rows if row.encoding == "quantize"]
    assert rows and all(row.sensitivity is not None for row in rows)


@pytest.mark.parametrize(
    ("budget_bits", "width"), [(2, 4), *(pytest.param(bits, bits, marks=pytest.mark.slow) for bits in (4, 7, 8))]
)
def test_the_step_itself_holds_what_planned_steps_do(budget_bits: int, width: int) -> None:
    """The whole batch is in codes of the budget; where a gradient is measured itself, in wide ones."""
    torch.manual_seed(0)
    x = torch.randn(4096, WIDTH)

    def held(**options: Any) -> int:
        model = compiled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), **options)
        before = held_bytes()
        loss = model(x).square().mean()
        found = held_bytes() - before
        loss.backward()
        return found

    # Beside the codes lie their minima and steps.
    narrower = held(max_gradient_noise=0.1) - held(budget_bits=budget_bits)
    assert narrower == pytest.approx((8 - width) / 8 * x.numel(), rel=0.1, abs=1000)


def test_the_gradient_of_the_step_itself_is_unbiased(cut: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    exact, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)), torch.randn(256, WIDTH)
    exact(x).square().mean().backward()
    expected, found = gradients(exact), []
    for seed in range(20):
        model = compiled(copy.deepcopy(exact), seed=seed)
        model(x).square().mean().backward()
        found.append(gradients(model))
        model(x)
    mean = [torch.stack(each).mean(0) for each in zip(*found, strict=True)]
    alone = max(relative_error(each, expected) for each in found)
    assert 0.005 < alone < 0.1 and len(cut) == 20
    assert relative_error(mean, expected) < alone / 3


def test_checkpointing_around_the_model_runs_it_again_as_it_was(cut: list[tuple[int, int]]) -> None:
    model, exact = without_dropout()
    x = torch.randn(ROWS, 4, WIDTH)
    exact(x).backward()
    expected = gradients(exact)
    compiled(model)
    for _ in range(3):
        checkpoint(model, x, use_reentrant=False).backward()
        assert relative_error(gradients(model), expected) < 0.2
    assert len(cut) == 1


def test_what_the_step_itself_ran_is_gone_when_its_graphs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[weakref.ref[torch.fx.GraphModule]] = []

    def noted(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        found = copy_module(module)
        copies.append(weakref.ref(found))
        return found

    monkeypatch.setattr(narrow_codes, "copy_module", noted)
    torch.manual_seed(0)
    model = compiled(Net("mean"))
    for _ in range(3):
        model(torch.randn(ROWS, 4, WIDTH)).backward()
    # The first time the graphs they were made for go.
    for _ in range(2):
        gc.collect()
    assert len(copies) == 2 and not any(each() for each in copies)


def test_the_step_itself_can_be_differentiated_again_later(cut: list[tuple[int, int]]) -> None:
    model, exact = without_dropout()
    x = torch.randn(ROWS, 4, WIDTH)
    exact(x).backward()
    expected, first = gradients(exact), compiled(model)(x)
    for _ in range(2):
        first.backward(retain_graph=True)
        assert relative_error(gradients(model), expected) < 0.2
        # By the plan, which the rows have led to.
        model(x).backward()
        assert relative_error(gradients(model), expected) < 0.2 and len(cut) == 1


def test_what_waits_to_be_profiled_is_a_few_rows() -> None:
    torch.manual_seed(0)
    model, x = compiled(Net()), torch.randn(4096, 4, WIDTH)
    before = held_bytes()
    model(x).mean().backward()
    model.zero_grad()
    session = session_of(model)
    assert session is not None and session.plan is None
    assert held_bytes() - before < 0.1 * x.nbytes


def test_rows_that_cannot_be_cut_are_profiled_whole(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FewRowsStep, parts: int) -> object:
        raise RuntimeError("no rows")

    monkeypatch.setattr(FewRowsStep, "recordings", fail)
    torch.manual_seed(0)
    model = compiled(Net("mean"))
    for _ in range(3):
        model(torch.randn(ROWS, 4, WIDTH)).backward()
    assert "profiling on a few rows failed with RuntimeError: no rows; the next step is profiled whole" in caplog.text
    assert gact_fx.inspect(model).ratio > 2


def test_the_plan_is_tried_on_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []
    squared_error = PlanMeter.squared_error

    def noted(self: PlanMeter, *args: Any) -> float:
        tried.append(squared_error(self, *args))
        return tried[-1]

    monkeypatch.setattr(PlanMeter, "squared_error", noted)
    torch.manual_seed(0)
    model = compiled(Net("mean"))
    model(torch.randn(ROWS, 4, WIDTH)).backward()
    assert gact_fx.inspect(model).plan is not None and tried


def test_rows_that_a_batch_norm_of_few_elements_ties_are_profiled_whole(cut: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    model = compiled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()))
    model(torch.randn(8 * ROWS, WIDTH)).square().mean().backward()
    assert gact_fx.inspect(model).plan is not None and not cut


class Attending(nn.Module):
    """Attention over the first dimension, or the second."""

    def __init__(self, is_fused: bool, is_first: bool) -> None:
        super().__init__()
        self.inner, self.is_fused, self.is_first = nn.Linear(WIDTH, 3 * WIDTH), is_fused, is_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inner(x.transpose(0, 1) if self.is_first else x).chunk(3, -1)
        if self.is_fused:
            return F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None]).square().mean()
        return ((query @ key.mT).softmax(-1) @ value).square().mean()


class Edges(nn.Module):
    """Every row adds two others to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(x))
        return (hidden + hidden[positions].sum(1)).square().mean()


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
def test_positions_of_a_sequence_are_no_rows(is_fused: bool, is_first: bool, cut: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    model = compiled(Attending(is_fused, is_first))
    model(torch.randn(ROWS, ROWS // 2, WIDTH)).backward()
    assert gact_fx.inspect(model).plan is not None and bool(cut) is not is_first


def test_nodes_of_a_graph_are_no_rows(cut: list[tuple[int, int]], caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = compiled(Edges())
    model(torch.randn(8 * ROWS, WIDTH), torch.randint(0, 8 * ROWS, (8 * ROWS, 2))).backward()
    assert gact_fx.inspect(model).plan is not None and not cut and "failed" not in caplog.text


def test_pairs_of_rows_are_profiled_whole(cut: list[tuple[int, int]]) -> None:
    class Pairs(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = F.gelu(self.a(x))
            return F.cross_entropy(hidden @ self.b(x).T, torch.arange(x.shape[0]))

    torch.manual_seed(0)
    model = compiled(Pairs())
    model(torch.randn(8 * ROWS, WIDTH)).backward()
    assert gact_fx.inspect(model).plan is not None and not cut


def test_results_that_are_no_multiple_of_the_rows(cut: list[tuple[int, int]]) -> None:
    """Neither they nor batches of two sizes in one step are an error of training."""

    class Differences(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = F.gelu(self.a(x))
            return hidden[1:] - hidden[:-1]

    torch.manual_seed(0)
    model = compiled(Differences())
    for _ in range(3):
        (model(torch.randn(ROWS, 4, WIDTH)).square().mean() + model(torch.randn(96, 4, WIDTH)).mean()).backward()
    assert not cut and gact_fx.inspect(model).ratio > 2
    model = compiled(Differences())
    for _ in range(3):
        model(torch.randn(ROWS, 4, WIDTH)).square().mean().backward()
    assert gact_fx.inspect(model).ratio > 2


def test_rows_without_a_gradient_say_nothing() -> None:
    torch.manual_seed(0)
    model, x = compiled(Net()), torch.randn(ROWS, 4, WIDTH)
    weights = (torch.arange(ROWS) >= ROWS // 4).float().view(-1, 1, 1)
    for _ in range(2):
        (model(x) * weights).sum().backward()
    assert variance(model) > 0


def test_code_before_a_large_graph_runs_once(cut: list[tuple[int, int]]) -> None:
    """A call is begun anew only where nothing has run in it."""
    calls: list[int] = []

    class Counted(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(calls))
            torch._dynamo.graph_break()
            return super().forward(x)

    torch.manual_seed(0)
    model = compiled(Counted("mean"))
    for step in range(3):
        model(torch.randn(ROWS, 4, WIDTH)).backward()
        assert calls == list(range(step + 1))
    assert not cut and gact_fx.inspect(model).ratio > 2


def test_a_forward_pass_without_backward_is_forgotten(cut: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    model = compiled(Net("mean"))
    model(torch.randn(ROWS, 4, WIDTH))
    for _ in range(2):
        model(torch.randn(ROWS, 4, WIDTH)).backward()
    assert gact_fx.inspect(model).plan is not None and cut == [(2, ROWS)]


@pytest.mark.parametrize("together", [True, False])
def test_two_runs_of_a_graph_in_one_step_are_profiled_whole(together: bool, cut: list[tuple[int, int]]) -> None:
    model, exact = without_dropout()
    compiled(model)
    for _ in range(4):
        batches = [torch.randn(ROWS, 4, WIDTH) for _ in range(2)]
        for each in (model, exact):
            first, second = map(each, batches)
            if together:
                (first + second).backward()
            else:
                first.backward()
                second.backward()
        # Also where codes of the first run are narrow, and those of the second are not.
        assert relative_error(gradients(model), gradients(exact)) < 0.2
    assert gact_fx.inspect(model).ratio > 2 and not cut
    assert all(row.copies == 2 for row in gact_fx.inspect(model).rows if row.encoding == "quantize")


def test_inputs_with_a_history_do_not_hold_it() -> None:
    class Shifted(Net):
        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x + shift)

    class Saved:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    torch.manual_seed(0)
    model, x, bias = compiled(Shifted("mean")), torch.randn(ROWS, 4, WIDTH), nn.Parameter(torch.ones(WIDTH))
    saved: list[weakref.ref[Saved]] = []

    def pack(value: torch.Tensor) -> Saved:
        kept = Saved(value)
        saved.append(weakref.ref(kept))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.value):
        shift = bias.square()
    model(x, shift).backward(retain_graph=True)
    del shift
    gc.collect()
    assert saved and not any(kept() for kept in saved)


def test_rows_are_taken_from_all_over_the_batch(cut: list[tuple[int, int]]) -> None:
    """Sorted rows would not stand for all."""
    torch.manual_seed(0)
    x, weights = torch.randn(ROWS, 32, WIDTH), torch.linspace(0.2, 2, ROWS).view(-1, 1, 1)
    few, whole = Net(), Net()
    whole.load_state_dict(few.state_dict())
    for model, options in ((few, {}), (whole, {"dynamic": False})):
        compiled(model, **options)
        (model(x) * weights).sum().backward()
    assert variance(few) == pytest.approx(variance(whole), rel=0.4)
    assert cut == [(2, ROWS)]
