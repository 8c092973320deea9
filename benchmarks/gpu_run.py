"""Everything that wants a GPU, in steps: `make gpu`, or `make gpu STEP=kernels` for one of them.

    python benchmarks/gpu_run.py [STEP ...] [--list]

A step takes at most 9 minutes, all of them 25. A step that fails does not keep the next one from running; the exit
status is then 1. A library that is missing is named, and leaves out what needs it. The build goes to build/gpu, and
nothing is installed. Results are saved as benchmarks/results/gpu-*.json, figures beside them.

Without a GPU every step says so in one line, and rehearses what it can: the kernels compile, and the benchmarks run
on the CPU in their smallest size, as they are installed here. What that measures is thrown away.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpu_steps import BUILD, ROOT, STEPS, Step, missing
from machine import describe, save

LONGEST, TOGETHER = 9 * 60, 25 * 60
OK, FAILED, LEFT_OUT = "ok", "FAILED", "left out"


@dataclass(frozen=True)
class Outcome:
    """What became of a step: "ok", "FAILED" or "left out", why, and seconds."""

    step: str
    result: str
    text: str
    seconds: float


def has_gpu() -> bool:
    return torch.cuda.is_available()


def surroundings(on_gpu: bool, scratch: str) -> dict[str, str]:
    """Environment of a step's commands: the build on a GPU, and elsewhere a folder for results that nobody keeps."""
    if not on_gpu:
        return {**os.environ, "GACT_FX_RESULTS": scratch}
    major, minor = torch.cuda.get_device_capability()
    path = os.pathsep.join([str(BUILD), *filter(None, [os.environ.get("PYTHONPATH")])])
    # PyTorch builds for this card alone, in a quarter of the time.
    return {"TORCH_CUDA_ARCH_LIST": f"{major}.{minor}", **os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def run_command(command: Sequence[str], folder: Path, environment: dict[str, str], limit_s: float) -> str:
    """Run a command; gives why it failed, or nothing. At the limit it ends with all that it started."""
    print(f"$ {' '.join(command)}", flush=True)
    child = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
    try:
        status = child.wait(timeout=max(limit_s, 1))
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    finally:
        # What a command leaves running would disturb the next one.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return "" if status == 0 else f"status {status}: {' '.join(command[:4])} ..."


def run_step(step: Step, on_gpu: bool, environment: dict[str, str], limit_s: float) -> Outcome:
    """Run all commands of a step, also those behind one that fails."""
    start = time.perf_counter()
    lacking = missing(step.needs)
    if lacking:
        text = f"needs {', '.join(lacking)}: pip install {' '.join(lacking)}"
        return Outcome(step.name, LEFT_OUT, text, 0.0)
    commands = step.commands(limit_s) if on_gpu else step.rehearsal()
    if not commands:
        return Outcome(step.name, LEFT_OUT, step.without_tool if on_gpu else step.without_gpu, 0.0)
    folder = step.folder if on_gpu else ROOT
    folder.mkdir(parents=True, exist_ok=True)
    failures = []
    for command in commands:
        left = limit_s - (time.perf_counter() - start)
        failures.append(run_command(command, folder, environment, left))
    why = "; ".join(filter(None, failures))
    done = "" if on_gpu else "no GPU: rehearsed without one"
    return Outcome(step.name, FAILED if why else OK, why or done, time.perf_counter() - start)


def run(steps: Sequence[Step], on_gpu: bool, limit: float) -> list[Outcome]:
    """Run the steps one after the other. Seconds that one does not take are there for those behind it."""
    outcomes = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        environment = surroundings(on_gpu, scratch)
        for number, step in enumerate(steps):
            behind = sum(other.share_s for other in steps[number + 1 :])
            left = limit - (time.perf_counter() - start) - behind
            where = f"on {torch.cuda.get_device_name()}" if on_gpu else "there is no GPU: rehearsing what needs none"
            print(f"\n=== {step.name}: {step.about} ({where})", flush=True)
            outcomes.append(run_step(step, on_gpu, environment, min(left, LONGEST)))
            print(f"=== {describe_outcome(outcomes[-1])}", flush=True)
    return outcomes


def describe_outcome(outcome: Outcome) -> str:
    return f"{outcome.step:10} {outcome.result:9} {outcome.seconds:5.0f} s  {outcome.text}".rstrip()


def chosen(names: Sequence[str], on_gpu: bool) -> list[Step]:
    """The steps called so, in their order. On a GPU the build goes first: it takes seconds where nothing changed."""
    return [step for step in STEPS if not names or step.name in names or (on_gpu and step.name == "build")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(step.name for step in STEPS))
    parser.add_argument("--list", action="store_true", help="name the steps, and end")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.steps) - {step.name for step in STEPS}):
        parser.error(f"no step is called {unknown[0]!r}; there are {', '.join(step.name for step in STEPS)}")
    if options.list:
        print("\n".join(f"{step.name:10} {step.about}" for step in STEPS))
        return 0
    on_gpu = has_gpu()
    limit = LONGEST if len(set(options.steps)) == 1 else TOGETHER
    outcomes = run(chosen(options.steps, on_gpu), on_gpu, limit)
    print(f"\n{describe()}")
    print("\n".join(describe_outcome(outcome) for outcome in outcomes))
    if on_gpu:
        save("run", {outcome.step: asdict(outcome) for outcome in outcomes})
    return int(any(outcome.result == FAILED for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
