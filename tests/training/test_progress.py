"""What somebody at a terminal sees of a first step, and what is said before it: bytes as they will be."""

import io
import logging
from collections.abc import Iterator

import pytest
import torch
from conftest import Mixed, mixed_batch

import gact_fx
from gact_fx.training.progress import size
from gact_fx.training.sample_batches import MOST_BATCHES


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("sampled", [False, True], ids=["first step", "sample batches"])
@pytest.mark.parametrize("logged", [False, True])
def test_a_terminal_sees_the_first_step(sampled: bool, logged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, batch = Terminal(), mixed_batch()
    monkeypatch.setattr("sys.stderr", terminal)
    # Whoever has asked for the log sees the lines there.
    logger = logging.getLogger("gact_fx")
    level = logger.level
    logger.setLevel(logging.INFO if logged else logging.WARNING)
    try:
        model = gact_fx.compile(Mixed(), inner="eager", sample_batches=[batch] if sampled else None)
        model(*batch).backward()
    finally:
        logger.setLevel(level)
    text = terminal.getvalue()
    plan = gact_fx.inspect(model).plan
    assert plan is not None
    assert f"/{len(plan.graphs[0].tensors)} " in text and "gact_fx: profiling" in text
    assert ("kB held for backward become" in text and "compiling" in text) is not logged


def test_nothing_is_written_where_no_terminal_is(capfd: pytest.CaptureFixture[str]) -> None:
    model = gact_fx.compile(Mixed(), inner="eager")
    model(*mixed_batch()).backward()
    assert gact_fx.inspect(model).plan is not None
    assert "gact_fx" not in capfd.readouterr().err


def test_the_bytes_of_a_plan_are_predicted() -> None:
    batch = mixed_batch()
    model = gact_fx.compile(Mixed(), inner="eager", sample_batches=[batch])
    note = gact_fx.inspect(model).note
    model(*batch).backward()
    report = gact_fx.inspect(model)
    assert f"a plan ({size(report.bytes_before)} held for backward become {size(report.bytes_after)})" in note


def test_of_a_loader_no_more_is_taken_than_needed() -> None:
    taken = []

    def loader() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index in range(100):
            taken.append(index)
            yield mixed_batch()

    gact_fx.compile(Mixed(), inner="eager", sample_batches=loader())
    assert len(taken) == MOST_BATCHES
