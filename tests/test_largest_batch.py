"""The largest batch of benchmarks/largest_batch.py: where the line of the worst step meets the limit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

largest = pytest.importorskip("largest_batch", reason="benchmarks/ is not on the path")
from peers_process import Case, Surroundings  # noqa: E402


def measured(first: float, second: float) -> list[dict[str, float]]:
    """Two batches of a method whose first step takes ``first`` bytes a row, and its second one ``second``."""
    return [{"rows": rows, "step 1": 100 + first * rows, "step 2": 400 + second * rows} for rows in (4.0, 8.0)]


@pytest.mark.parametrize(
    ("first", "second", "limit", "rows"), [(10, 1, 1100, 100), (10, 10, 1100, 70), (0, 1, 500, 100), (5, 5, 390, 0)]
)
def test_the_worst_step_decides(first: float, second: float, limit: float, rows: int) -> None:
    assert largest.largest_batch(measured(first, second), limit) == rows


def test_memory_that_does_not_grow_has_no_largest_batch() -> None:
    with pytest.raises(ValueError, match="no more memory"):
        largest.largest_batch(measured(0, 0), 1e9)


@pytest.mark.slow
def test_the_line_foretells_another_batch(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:
        around = Surroundings(str(tmp_path / "cache"), log, 600)
        case = Case("unet", "eager", small=True)
        row = largest.measure(case, around, 1)
        four = largest.peaks(Case("unet", "eager", small=True, times=4), around)
    assert four["rows"] == 16
    assert largest.largest_batch(row["measured"], four["step 1"] * 1.02) == 16


def test_larger_batches_are_measured_until_half_the_limit_is_reached(tmp_path: Path, monkeypatch: Any) -> None:
    """With few rows the peak of a step may be gradients, and with many what grows with the rows."""
    asked: list[int] = []

    def peaks(case: Case, around: object) -> dict[str, float]:
        asked.append(case.times)
        rows = 4.0 * case.times
        return {"rows": rows, "step 1": max(400 + rows, 25 * rows), "step 2": 100 + 10 * rows}

    monkeypatch.setattr(largest, "peaks", peaks)
    row = largest.measure(Case("unet", "eager"), Surroundings(str(tmp_path), sys.stderr, 1), 4000.0)
    assert asked[:2] == [1, 2] and 2000 <= 25 * 4 * asked[-1] < 4000
    assert largest.largest_batch(row["measured"], 4000.0) == 4000 // 25


def test_what_fails_with_more_rows_leaves_what_was_measured(tmp_path: Path, monkeypatch: Any) -> None:
    def peaks(case: Case, around: object) -> dict[str, float]:
        if case.times > 2:
            raise largest.Failure("no answer")
        return {"rows": 4.0 * case.times, "step 1": 400 + case.times}

    monkeypatch.setattr(largest, "peaks", peaks)
    row = largest.measure(Case("unet", "eager"), Surroundings(str(tmp_path), sys.stderr, 1), 4000.0)
    assert [each["rows"] for each in row["measured"]] == [4, 8]
    assert "with more rows: no answer" in largest.describe_row("unet", row, {}, 4000.0)


def test_where_few_rows_take_nothing_more_are_tried(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        largest, "peaks", lambda case, around: {"rows": 4.0 * case.times, "step 1": max(400.0, 40.0 * case.times)}
    )
    row = largest.measure(Case("unet", "eager"), Surroundings(str(tmp_path), sys.stderr, 1), 4000.0)
    assert largest.largest_batch(row["measured"], 4000.0) == 400


def test_a_run_is_resumed_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("GACT_FX_RESULTS", str(tmp_path))
    monkeypatch.setattr(
        largest, "peaks", lambda case, around: {"rows": 4.0 * case.times, "step": 100 + 40.0 * case.times}
    )
    asked = ["largest_batch.py", "unet", "--small", "--memory", "1.1e-6", "--methods"]
    monkeypatch.setattr(sys, "argv", [*asked, "eager", "compile"])
    largest.main()
    row = next(line for line in capsys.readouterr().out.splitlines() if "torch.compile" in line and "unet" in line)
    assert row.split()[-2:] == ["100", "1.0x"]
    monkeypatch.setattr(largest, "measure", lambda *args: pytest.fail("it was there already"))
    monkeypatch.setattr(sys, "argv", [*asked, "eager", "compile", "--resume"])
    largest.main()
    pytest.importorskip("matplotlib", reason="it draws the figure")
    monkeypatch.setattr(sys, "argv", ["largest_batch.py", "--small", "--plot", str(tmp_path / "figure.png")])
    largest.main()
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_method_that_fails_says_why(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:
        row = largest.measure(Case("no such network", "eager"), Surroundings(str(tmp_path), log, 600), 1)
    assert "KeyError" in row["failed"] and "KeyError" in largest.describe_row("unet", row, {}, 1e9)
    with pytest.raises(RuntimeError, match="nothing was measured"):
        largest.draw({}, tmp_path / "figure.png", 1e9, "a machine", "fp32")
