"""A few large rows are measured one after the other: there is never more than one of them in memory."""

import copy
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gact_fx
from gact_fx.profiling import few_rows, few_rows_step
from gact_fx.profiling.few_rows import FewRows
from gact_fx.profiling.tape import Step
from gact_fx.training import row_tracing
from gact_fx.training.session import Session

ROWS, LENGTH, WIDTH = 8, 32, 32


@pytest.fixture(autouse=True)
def small_graphs_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (few_rows, row_tracing):
        monkeypatch.setattr(module, "ENOUGH_NBYTES", 2**13)
    monkeypatch.setattr(few_rows_step, "PART_NBYTES", 2**12)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every backward pass that is measured; none may be there when the next one is."""
    found: list[int] = []
    steps: list[weakref.ref[Step]] = []
    weighed, measure = few_rows_step._weighed, Session.measure

    def noted(graphs: Sequence[FewRows], weights: Sequence[float] = ()) -> list[Step]:
        assert all(step() is None for step in steps)
        found.append(graphs[0].few)
        return weighed(graphs, weights)

    def watched(self: Session, given: list[Step], bar: object = None) -> object:
        steps.extend(map(weakref.ref, given))
        return measure(self, given, bar)

    monkeypatch.setattr(few_rows_step, "_weighed", noted)
    monkeypatch.setattr(Session, "measure", watched)
    return found


class Net(nn.Module):
    """Labels below zero are left out of the loss, where there are any."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor] = F.relu, reduction: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.act, self.reduction = act, reduction

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = self.c(self.act(self.b(self.act(self.a(x)))))
        return F.cross_entropy(y.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction=self.reduction)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, LENGTH, WIDTH), torch.randint(WIDTH, (ROWS, LENGTH))


def variance_of(model: nn.Module, x: torch.Tensor, labels: torch.Tensor, **options: object) -> float:
    gact_fx.compile(model, inner="eager", min_elements=64, **options)  # type: ignore[arg-type]
    model(x, labels).backward()
    plan = gact_fx.inspect(model).plan
    assert plan is not None and plan.variance is not None
    return plan.variance


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_each_is_measured_alone_and_the_variance_is_that_of_all(reduction: str, measured: list[int]) -> None:
    few, whole = Net(reduction=reduction), Net(reduction=reduction)
    found, expected = variance_of(few, *batch()), variance_of(whole, *batch(), dynamic=False)
    assert measured == [1, 1] and found == pytest.approx(expected, rel=0.3)


def test_a_row_without_labels_is_measured_with_another(measured: list[int]) -> None:
    """The mean over none of its labels is no number."""
    x, labels = batch()
    labels[:5] = -1
    assert 0 < variance_of(Net(), x, labels) < float("inf")
    assert measured == [2]


def test_rows_of_which_one_has_few_labels_are_measured_together(measured: list[int]) -> None:
    """Alone, one label would count as much as all of another row."""
    x, labels = batch()
    labels[:4, 1:] = -1
    found, expected = variance_of(Net(), x, labels), variance_of(Net(), x, labels, dynamic=False)
    assert measured == [2] and found == pytest.approx(expected, rel=0.5)


def test_where_one_row_cannot_be_run_two_are(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    run = FewRows.run

    def fails(self: FewRows, numbers: dict[int, int]) -> tuple[Step, float | None]:
        if self.few == 1:
            raise ZeroDivisionError
        return run(self, numbers)

    monkeypatch.setattr(FewRows, "run", fails)
    assert variance_of(Net(), *batch()) > 0
    assert measured == [2]


class Writing(nn.Module):
    """Writes to the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x.div_(10)).relu()).square().mean()


def test_rows_that_forward_writes_to_are_as_they_came_whenever_they_run(measured: list[int]) -> None:
    found, expected = variance_of(Writing(), *batch()), variance_of(Writing(), *batch(), dynamic=False)
    assert measured == [1, 1] and found == pytest.approx(expected, rel=0.3)


def test_small_rows_are_measured_together(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows_step, "PART_NBYTES", 2**24)
    variance_of(Net(), *batch())
    assert measured == [2]


@pytest.mark.parametrize(
    ("act", "rows"),
    [
        (lambda x: x.squeeze().relu(), [2]),
        (lambda x: x.squeeze(0).relu(), [2]),
        (lambda x: (x + x.flip(0)).relu(), [2]),
        (lambda x: (x + x.roll(1, 0)).relu(), [2]),
        (lambda x: x.unsqueeze(1).relu().squeeze(1), [1, 1]),
        (lambda x: (x + x.flip(-1)).relu(), [1, 1]),
    ],
)
def test_what_one_row_would_compute_otherwise_is_measured_on_two(
    act: Callable[[torch.Tensor], torch.Tensor], rows: list[int], measured: list[int]
) -> None:
    variance_of(Net(act), *batch())
    assert measured == rows


def test_training_is_as_it_was_without(measured: list[int]) -> None:
    model, x = Net(), batch()
    reference = copy.deepcopy(model)
    variance_of(model, *x, budget_bits=8)
    for network in (model, reference):
        network.zero_grad()
        network(*x).backward()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert found.grad is not None and expected.grad is not None
        assert (found.grad - expected.grad).norm() < 0.02 * expected.grad.norm()
    assert measured == [1, 1]
