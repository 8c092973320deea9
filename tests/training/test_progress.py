"""What somebody at a terminal sees of a first step, and what is said before it: bytes as they will be."""

import contextlib
import io
import logging
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from conftest import Mixed, mixed_batch

import gact_fx
from gact_fx.training.progress import size
from gact_fx.training.sample_batches import MOST_BATCHES

LOGGER = logging.getLogger("gact_fx")


@contextlib.contextmanager
def level(value: int) -> Iterator[None]:
    """Within, the logger has that level."""
    before = LOGGER.level
    LOGGER.setLevel(value)
    try:
        yield
    finally:
        LOGGER.setLevel(before)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("sampled", [False, True], ids=["first step", "sample batches"])
@pytest.mark.parametrize("logged", [False, True])
def test_a_terminal_sees_the_first_step(sampled: bool, logged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, batch = Terminal(), mixed_batch()
    monkeypatch.setattr("sys.stderr", terminal)
    # Whoever has asked for the log sees the lines there.
    with level(logging.INFO if logged else logging.NOTSET):
        model = gact_fx.compile(Mixed(), inner="eager", sample_batches=[batch] if sampled else None)
        model(*batch).backward()
    text = terminal.getvalue()
    plan = gact_fx.inspect(model).plan
    assert plan is not None
    assert f"/{len(plan.graphs[0].tensors)} " in text and "gact_fx: profiling" in text
    assert ("kB held for backward become" in text and "compiling" in text) is not logged


def test_a_level_silences_a_terminal_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with level(logging.WARNING):
        model = gact_fx.compile(Mixed(), inner="eager")
        model(*mixed_batch()).backward()
    assert gact_fx.inspect(model).plan is not None and terminal.getvalue() == ""


def test_the_story_of_a_run(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gact_fx"):
        model = gact_fx.compile(Mixed(), inner="eager")
        for _ in range(4):
            model(*mixed_batch()).backward()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len(lines) == 5 and all(line.startswith("Mixed: ") for line in lines), lines
    told = [
        "the next training step is profiled",
        r"profiling \d+ saved tensors in 1 graphs",
        r"planned \d+ .* kB held for backward become .* kB",
        "compiling",
        "training by the plan, in 1 compiled",
    ]
    for line, wanted in zip(lines, told, strict=True):
        assert re.search(wanted, line), line


@pytest.mark.slow
def test_warnings_reach_programs_that_handle_no_log() -> None:
    """Nothing else does; a handler of theirs, or a level, takes the place of ours."""
    program = """
import logging, sys, torch, gact_fx
if sys.argv[1] == "handler":
    logging.basicConfig(format="theirs: %(message)s")
if sys.argv[1] == "level":
    logging.getLogger("gact_fx").setLevel(logging.ERROR)
model = gact_fx.compile(torch.nn.Linear(4, 4), inner="eager")
model(torch.randn(2, 4)).sum().backward()
"""
    for how, wanted in (
        ("nothing", "gact_fx: Linear: nothing to"),
        ("handler", "theirs: Linear: nothing to"),
        ("level", ""),
    ):
        done = subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, timeout=300)
        lines = [line for line in done.stderr.splitlines() if "Linear" in line]
        assert done.returncode == 0 and len(lines) == bool(wanted), done.stderr[-2000:]
        assert not lines or lines[0].startswith(wanted)


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
