"""One method of `peers.py` in a process of its own: the process, and the side of it that asks.

The process reads commands, a line each, and answers with a line of JSON: ``memory``, ``step``, ``peaks`` or ``error``.
What fails answers with ``{"failed": why}`` and ends the process.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import IO, Any, cast

import torch
from networks import Network
from peak_bytes import peak_bytes
from torch import Tensor, nn

ANSWER = "answer: "
# The method of `Training` that answers a command.
ANSWERS = {"memory": "memory", "step": "timed_step", "peaks": "peaks"}
FULL = 0.8  # the share of a GPU's memory that eager PyTorch is to take


@dataclass(frozen=True)
class Case:
    """What is trained: a network of ``real_networks.py``, with ``method`` of ``peers_methods.py`` upon it."""

    network: str
    method: str
    amp: bool = False
    small: bool = False
    times: int = 1
    device: str = "cpu"


# ---- In the process ----------------------------------------------------------------------------------------------


class Training:
    """A fresh network with a method upon it."""

    def __init__(self, case: Case, dropout: bool = True) -> None:
        from peers_methods import METHODS, around

        self.case, self.method = case, METHODS[case.method]
        self.model, self.batch, self.loss_fn = fresh(case)
        if not dropout:
            turn_off_dropout(self.model)
        self.around = around(self.method, self.model)

    def loss(self) -> Tensor:
        with torch.autocast(self.case.device, torch.bfloat16, enabled=self.case.amp), self.around():
            return self.loss_fn(self.model, self.batch)

    def step(self) -> float:
        """Seconds of forward and backward."""
        self.model.zero_grad(set_to_none=True)
        self._synchronize()
        start = time.perf_counter()
        self.loss().backward()
        self._synchronize()
        return time.perf_counter() - start

    def warm_up(self) -> float:
        """Seconds of the steps that compile and measure."""
        seconds = sum(self.step() for _ in range(self.method.steps_before))
        if self.method.check is not None:
            self.method.check()
        return seconds

    def memory(self) -> dict[str, float]:
        """Bytes of one step above the parameters; see ``peak_bytes.Peak``."""
        first = self.warm_up()
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        found = peak_bytes(self.loss, self.case.device)
        gradients = sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)
        return {"gradients": gradients, "peak": found.step, "held": found.held, "first_seconds": first}

    def peaks(self) -> dict[str, float]:
        """Bytes above the parameters at the peak of every step until nothing compiles any more, and the rows of one."""
        found: dict[str, float] = {"rows": len(next(iter(self.batch.values())))}
        for step in range(self.method.steps_before):
            self.model.zero_grad(set_to_none=True)
            gc.collect()
            found[f"step {step + 1}"] = peak_bytes(self.loss, self.case.device).step
        return found

    def timed_step(self) -> dict[str, float]:
        """Seconds of a step. On a GPU one more step goes before, and the memory is given back for the others' steps."""
        if self.case.device != "cuda":
            return {"seconds": self.step()}
        self.step()
        seconds = self.step()
        self.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return {"seconds": seconds}

    def gradients(self) -> dict[str, Tensor]:
        return {key: p.grad.cpu() for key, p in self.model.named_parameters() if p.grad is not None}

    def _synchronize(self) -> None:
        if self.case.device == "cuda":
            torch.cuda.synchronize()


def fresh(case: Case) -> Network:
    from real_networks import build

    model, batch, loss_fn = build(case.network, small=case.small, times=case.times)
    return model.to(case.device), {key: value.to(case.device) for key, value in batch.items()}, loss_fn


def turn_off_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def gradient_error(case: Case) -> dict[str, float]:
    """The distance of a step's gradient from eager PyTorch's, dropout off, as a share of the latter's norm."""
    exact = Training(Case(**{**asdict(case), "method": "eager"}), dropout=False)
    exact.step()
    expected = exact.gradients()
    del exact
    training = Training(case, dropout=False)
    training.warm_up()
    training.step()
    found = training.gradients()
    if found.keys() != expected.keys():
        raise RuntimeError(f"other parameters have a gradient than in eager: {sorted(found.keys() ^ expected.keys())}")
    square = sum(float((found[key] - value).double().square().sum()) for key, value in expected.items())
    return {"error": float((square / sum(float(v.double().square().sum()) for v in expected.values())) ** 0.5)}


def serve(case: Case) -> None:
    """Answer commands until there are no more."""
    training: Training | None = None
    for line in sys.stdin:
        command = line.strip()
        try:
            if command == "error":
                answer = gradient_error(case)
            else:
                training = training or Training(case)
                answer = getattr(training, ANSWERS[command])()
        except Exception as error:
            print(ANSWER + json.dumps({"failed": reason(error)}), flush=True)
            raise
        print(ANSWER + json.dumps(answer), flush=True)


def reason(error: Exception) -> str:
    """The first line of what an error says, without what follows it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


# ---- Beside it ---------------------------------------------------------------------------------------------------


class Failure(Exception):
    """The process could not do what it was asked; the text says why."""


@dataclass(frozen=True)
class Surroundings:
    """What the processes of one run share: a folder for compiled kernels, a log, and seconds for one answer.

    PyTorch's other compile caches are off: every process traces, partitions and plans anew. A kernel's file is named
    by its source, so that two methods with the same kernel compile it once.
    """

    folder: str
    log: IO[str]
    limit_s: float


class Process:
    """A fresh process that trains one case."""

    def __init__(self, case: Case, around: Surroundings) -> None:
        self._limit = around.limit_s
        caches = {"TORCHINDUCTOR_CACHE_DIR": around.folder, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        self._child = subprocess.Popen(
            [sys.executable, __file__, json.dumps(asdict(case))], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=around.log, text=True, env={**os.environ, **caches},
        )  # fmt: skip

    def ask(self, command: str) -> dict[str, float]:
        """The answer to ``command``; raises `Failure`."""
        stdin, stdout = cast(IO[str], self._child.stdin), cast(IO[str], self._child.stdout)
        late = threading.Timer(self._limit, self._child.kill)
        late.start()
        try:
            # It may have ended already; the loop below then finds no answer.
            with contextlib.suppress(BrokenPipeError):
                print(command, file=stdin, flush=True)
            for line in stdout:
                if line.startswith(ANSWER):
                    found: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                    if "failed" in found:
                        raise Failure(found["failed"])
                    return found
        finally:
            in_time = late.is_alive()
            late.cancel()
        status = self._child.wait()
        raise Failure(f"the process ended with status {status}" if in_time else f"no answer within {self._limit:g} s")

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            cast(IO[str], self._child.stdin).close()
        cast(IO[str], self._child.stdout).close()
        try:
            self._child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def parse_times(text: str) -> str:
    """For argparse: a whole number of times the rows, or "fill"."""
    if text != "fill" and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f'a positive whole number or "fill", got {text!r}')
    return text


def times_that_fill(case: Case, around: Surroundings) -> int:
    """How many times the rows eager PyTorch has room for on the GPU, as a power of two; 1 where it fails at one."""
    try:
        with Process(replace(case, method="eager"), around) as process:
            peak = process.ask("memory")["peak"]
    except Failure as failure:
        print(f"{case.network}: eager PyTorch fails on the GPU: {failure}", flush=True)
        return 1
    times = 1
    while 2 * times * peak < FULL * torch.cuda.mem_get_info()[1]:
        times *= 2
    return times


if __name__ == "__main__":
    serve(Case(**json.loads(sys.argv[1])))
