"""Widths by place in training: who gets them, what they gain, and what other batches get."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import gradients
from torch import nn
from torch.nn import functional as F

import gact_fx
from gact_fx.codec.by_place import count_places, mean_bits, picture, runs_of
from gact_fx.diagnostics.report_rows import Row

LENGTH, WIDTH = 16, 256
Batch = tuple[torch.Tensor, torch.Tensor]


class First(nn.Module):
    """The loss reads the first place of a sequence, of which the others change little."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = torch.sigmoid(self.a(x))
        h = torch.sigmoid(self.b(h))
        return F.cross_entropy(self.head(h[:, 0] + 0.01 * h.mean(1)), y)


def batch(rows: int, length: int = LENGTH) -> Batch:
    return torch.randn(rows, length, WIDTH), torch.randint(0, 5, (rows,))


def planned(inner: str = "eager", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = gact_fx.compile(First(), budget_bits=3, inner=inner, min_elements=256, **options)
    for _ in range(2):
        model(*batch(8)).backward()
    return model


def by_place(model: nn.Module) -> list[Row]:
    return [row for row in gact_fx.inspect(model).rows if row.by_place]


def squared_error(model: nn.Module, of: Batch) -> float:
    exact = First()
    exact.load_state_dict(model.state_dict())
    model.zero_grad()
    model(*of).backward()
    exact(*of).backward()
    pairs = zip(gradients(model), gradients(exact), strict=True)
    return sum(float((found - wanted).square().sum()) for found, wanted in pairs)


def test_the_place_that_counts_gets_more_bits() -> None:
    rows = by_place(planned())
    assert rows
    for row in rows:
        widths = [run.bits for run in runs_of(row.by_place)]
        assert row.group_size is not None
        assert count_places(row.by_place) * row.group_size == LENGTH * WIDTH
        assert widths[0] == max(widths) > min(widths)
        assert row.bits == mean_bits(row.by_place)


def test_as_many_bytes_add_less_variance() -> None:
    model = planned()
    adaptive = gact_fx.inspect(model)
    plain = gact_fx.inspect(planned(group_size=256, adaptive=False))
    assert adaptive.bytes_after < 1.05 * plain.bytes_after
    found = sum(squared_error(model, batch(64)) for _ in range(5))
    alike = planned(group_size=256, adaptive=False)
    assert 4 * found < sum(squared_error(alike, batch(64)) for _ in range(5))


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_other_batch_sizes_have_the_same_widths(inner: str) -> None:
    model = planned(inner)
    before = [(row.by_place, row.group_size) for row in by_place(model)]
    assert before
    for rows in (8, 3, 1, 20):
        assert squared_error(model, batch(rows)) < 1e-3
        assert [(row.by_place, row.group_size) for row in by_place(model)] == before


def test_other_lengths_have_one_width_and_the_report_says_so() -> None:
    model = planned()
    count = len(by_place(model))
    for length in (12, 20, 7):
        assert squared_error(model, batch(8, length)) < 1e-2
    rows = gact_fx.inspect(model).rows
    assert not by_place(model)
    assert sum("rows of another length" in row.reason for row in rows) == count


def test_a_plan_is_saved_with_them(tmp_path: Path) -> None:
    model = planned()
    plan = gact_fx.inspect(model).plan
    assert plan is not None
    plan.save(tmp_path / "plan.json")
    again = gact_fx.compile(First(), plan=gact_fx.Plan.load(tmp_path / "plan.json"), inner="eager", min_elements=256)
    again(*batch(8)).backward()
    assert gact_fx.Plan.load(tmp_path / "plan.json") == plan
    assert [row.by_place for row in by_place(again)] == [row.by_place for row in by_place(model)]


def test_the_table_shows_a_picture() -> None:
    model = planned()
    text = gact_fx.inspect(model).table()
    assert all(picture(row.by_place) in text for row in by_place(model))


def test_one_row_tells_no_pattern() -> None:
    model = gact_fx.compile(First(), budget_bits=3, inner="eager", min_elements=256)
    for _ in range(2):
        model(*batch(1)).backward()
    assert not by_place(model)
