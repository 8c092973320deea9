"""Growth of resident memory over one training step of BERT, for torch.compile, for gact_fx, and while it profiles.

    python benchmarks/resident.py [--batch-size 64] [--budget-bits 4]

Each way runs in a process of its own, warmed up by three steps. Before a measured step gradients are dropped and freed
memory is given back to the system. The growth is what the process holds at most during forward, loss and backward
(VmHWM), less what it held before (VmRSS): activations, gradients, and what the kernels need while they run. The median
of three steps counts. "Profiling" is a batch of ``sample_batches``. Reads /proc, so it is for Linux with glibc.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from machine import describe, save
from networks import Batch, build

import gact_fx

# By default glibc raises these thresholds as large blocks are freed, up to 32 MiB, and then keeps what is freed below
# them. Set, they stay: every tensor from 128 KiB on has pages of its own, which leave the process as it is freed.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17), "MALLOC_TRIM_THRESHOLD_": str(1 << 17)}
WARM_UP, STEPS = 3, 3
WAYS = ("torch.compile", "gact_fx", "profiling")
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def status(field: str) -> int:
    """Bytes that the system gives for this process under ``field``."""
    found = re.search(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{STATUS} has no {field}")
    return 1024 * int(found.group(1))


def grow(way: str, batch_size: int, budget_bits: float) -> list[int]:
    """Growth in bytes over each of the measured steps, in this process."""
    model, batch, loss_fn = build("bert", batch_size=batch_size)
    if way == "profiling":
        growth: list[int] = []
        batches = _watched([batch] * (WARM_UP + STEPS), growth)
        gact_fx.compile(model, budget_bits=budget_bits, sample_batches=batches, loss_fn=loss_fn)
        return growth[WARM_UP:]
    if way == "gact_fx":
        gact_fx.compile(model, budget_bits=budget_bits, sample_batches=[batch], loss_fn=loss_fn)
    else:
        model.compile()

    def step() -> None:
        loss_fn(model, batch).backward()

    for _ in range(WARM_UP):
        step()
    growth = []
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        before = start()
        step()
        growth.append(status("VmHWM") - before)
    return growth


def start() -> int:
    """Resident bytes; the high-water mark starts anew from here."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    CLEAR_REFS.write_text("5")
    return status("VmRSS")


def _watched(batches: list[Batch], growth: list[int]) -> Iterator[Batch]:
    """The batches, each with what memory grows by until the next one is asked for."""
    for batch in batches:
        before = start()
        yield batch
        growth.append(status("VmHWM") - before)


def grow_elsewhere(way: str, batch_size: int, budget_bits: float) -> list[int]:
    """What :func:`grow` finds in a fresh process."""
    arguments = ["--child", way, "--batch-size", str(batch_size), "--budget-bits", str(budget_bits)]
    command = [sys.executable, __file__, *arguments]
    child = subprocess.run(command, env={**os.environ, **GIVE_BACK}, stdout=subprocess.PIPE, text=True, check=True)
    return [int(value) for value in json.loads(child.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--budget-bits", type=float, default=4.0)
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)  # measure here, print JSON
    options = parser.parse_args()
    if options.child:
        print(json.dumps(grow(options.child, options.batch_size, options.budget_bits)))
        return
    if not CLEAR_REFS.exists() or platform.libc_ver()[0] != "glibc":
        sys.exit("resident.py reads /proc and trims glibc's heap: it is available only on Linux with glibc")
    print(f"growth of resident memory over a step of BERT, batch {options.batch_size} x 128, at ", end="")
    print(f"budget_bits={options.budget_bits:g}; {describe()}")
    print(f"{'way':14} {'growth':>10} {'ratio':>7}   each step")
    results: dict[str, list[int]] = {}
    for way in WAYS:
        each = results[way] = grow_elsewhere(way, options.batch_size, options.budget_bits)
        growth = statistics.median(each)
        ratio = statistics.median(results["torch.compile"]) / growth
        steps = "  ".join(f"{value / 1e6:.1f}" for value in each)
        print(f"{way:14} {growth / 1e6:7.1f} MB {ratio:6.2f}x   {steps}", flush=True)
    save(f"resident-{options.budget_bits:g}bits", {"batch_size": options.batch_size, "growth": results})


if __name__ == "__main__":
    main()
