"""`make gpu` as far as it goes without a GPU: which steps run, what a failing or late one does, what it says."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

gpu_run = pytest.importorskip("gpu_run", reason="benchmarks/ is not on the path")
import gpu_steps  # noqa: E402
from gpu_steps import PYTHON, STEPS, Step  # noqa: E402
from machine import results_path  # noqa: E402

NAMES = [step.name for step in STEPS]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "has_gpu", lambda: False)


def step(name: str, *programs: str, **more: Any) -> Step:
    """A step whose rehearsal runs Python programs."""
    commands: list[gpu_steps.Command] = [(PYTHON, "-c", program) for program in programs]
    return Step(name, "a test", 10, lambda seconds: commands, lambda: commands, **more)


def test_it_has_the_steps_of_the_issue() -> None:
    assert NAMES == ["build", "test", "kernels", "peak", "peers", "step", "sanitizer"]
    assert sum(each.share_s for each in STEPS) <= gpu_run.TOGETHER == 25 * 60
    assert all(each.share_s <= gpu_run.LONGEST == 9 * 60 for each in STEPS)


def test_a_failing_step_does_not_stop_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "ran"
    steps = (
        step("first", "raise SystemExit(3)", f"open({str(mark)!r}, 'w')"),
        step("second", "print('second runs')"),
        step("third", "1", needs=("a_library_that_nobody_has",)),
        step("fourth", without_gpu="nothing to rehearse"),
    )
    monkeypatch.setattr(gpu_run, "STEPS", steps)
    assert gpu_run.main([]) == 1
    said = capfd.readouterr().out
    assert "second runs" in said and mark.exists()
    *_, first, second, third, fourth = said.splitlines()
    assert first.startswith("first      FAILED") and "status 3" in first
    assert second.startswith("second     ok") and "no GPU" in second
    assert third.startswith("third      left out") and "pip install a_library_that_nobody_has" in third
    assert fourth.startswith("fourth     left out") and fourth.endswith("nothing to rehearse")
    # One of them alone; what is left out is no failure.
    assert gpu_run.main(["second"]) == 0 and gpu_run.main(["third", "fourth"]) == 0


def test_a_late_step_ends_with_all_that_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    child = f"import time; time.sleep(3); open({str(mark)!r}, 'w')"
    program = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    [outcome] = gpu_run.run([step("late", program)], False, limit=1.5)
    assert outcome.result == gpu_run.FAILED and "stopped after" in outcome.text and outcome.seconds < 30
    time.sleep(3)
    assert not mark.exists()


def test_seconds_that_are_left_go_to_the_steps_behind() -> None:
    seen = []

    def commands(seconds: float) -> list[gpu_steps.Command]:
        seen.append(seconds)
        return []

    each = replace(step("one"), commands=commands)
    for limit in (30, 2000):
        start = time.perf_counter()
        for number in range(3):
            behind = 10 * (2 - number)
            gpu_run.run_step(each, True, {}, min(limit - (time.perf_counter() - start) - behind, gpu_run.LONGEST))
    assert [round(seconds) for seconds in seen] == [10, 20, 30, 540, 540, 540]


def test_an_unknown_step_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_run.main(["kernel"])
    assert "'kernel'" in capsys.readouterr().err
    assert gpu_run.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == NAMES


def test_on_a_gpu_the_build_goes_first() -> None:
    assert [each.name for each in gpu_run.chosen(["kernels"], True)] == ["build", "kernels"]
    assert [each.name for each in gpu_run.chosen(["kernels"], False)] == ["kernels"]
    assert [each.name for each in gpu_run.chosen([], True)] == NAMES


def benchmark_commands() -> Iterator[Any]:
    """Every command that runs one of our benchmarks, on a GPU and in a rehearsal."""
    for each in STEPS:
        for way, commands in (("gpu", each.commands(300)), ("rehearsal", each.rehearsal())):
            for number, command in enumerate(commands):
                if "benchmarks" in command[1]:
                    yield pytest.param(command, id=f"{each.name}-{way}-{number}")


@pytest.mark.parametrize("command", list(benchmark_commands()))
def test_benchmarks_understand_their_options(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    python, script, *arguments = command
    assert python == PYTHON
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    options = importlib.import_module(Path(script).stem).parse_options()
    if "--" in arguments:
        assert options.networks == arguments[arguments.index("--") + 1 :]


def test_commands_name_files_that_exist() -> None:
    for each in STEPS:
        for command in (*each.commands(300), *each.rehearsal()):
            for argument in command[1:]:
                if argument.endswith((".py", ".sh", ".toml")):
                    assert (gpu_steps.ROOT / argument).exists(), argument
    names = ["test_cuda.py", "test_swap_codes.py", "test_cuda_training.py"]
    assert [Path(path).name for path in gpu_steps.cuda_tests()] == names


def test_without_transformers_a_network_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_steps, "missing", lambda modules: list(modules))
    assert gpu_steps.networks() == ("unet",)


def test_results_have_their_folder_and_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GACT_FX_RESULTS", str(tmp_path))
    assert results_path("peak").parent == tmp_path and results_path("peak").name.startswith("peak-")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    assert results_path("peak").name == "gpu-peak-nvidia-h100.json"


def test_rehearsals_throw_their_results_away(tmp_path: Path) -> None:
    environment = gpu_run.surroundings(False, str(tmp_path))
    assert environment["GACT_FX_RESULTS"] == str(tmp_path) and "build" not in environment.get("PYTHONPATH", "")
