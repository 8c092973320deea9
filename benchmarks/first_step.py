"""Wall time until the first step is done, with no compilation cached: torch.compile and gact_fx.

    python benchmarks/first_step.py [--budget-bits 4] [--repeats 1] [--real] [--amp] [NETWORK ...]

From the call of ``model.compile()`` or ``gact_fx.compile(model, ...)`` to the end of the first compiled step (forward,
loss, backward). For gact_fx that includes measuring sensitivities and choosing widths: on ``sample_batches``, before
the first step. With ``--real``, networks have the sizes that people train (``real_networks.py``), and gact_fx measures
between the first two training steps, as without ``sample_batches``; the clock stops behind the second one, the first
that is planned. Every measurement is a process of its own with an empty cache folder; imports and the making of the
network are not timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch._inductor.compile_fx  # so that its import, too, comes before the clock starts
from machine import describe, save
from networks import build
from real_networks import build as build_real

import gact_fx

WAYS = ("torch.compile", "gact_fx")


def first_step(way: str, network: str, budget_bits: float, *, real: bool = False, amp: bool = False) -> float:
    """Seconds from the call of compile to the end of the first compiled step, in this process."""
    model, batch, loss_fn = (build_real if real else build)(network)
    steps = 1
    start = time.perf_counter()
    if way == "torch.compile":
        model.compile()
    elif real:
        gact_fx.compile(model, budget_bits=budget_bits)
        steps = 2
    else:
        gact_fx.compile(model, budget_bits=budget_bits, sample_batches=[batch], loss_fn=loss_fn)
    for _ in range(steps):
        with torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16, enabled=amp):
            loss = loss_fn(model, batch)
        loss.backward()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def first_step_elsewhere(way: str, network: str, options: argparse.Namespace) -> float:
    """What :func:`first_step` takes in a fresh process with an empty cache."""
    command = [sys.executable, __file__, network, "--child", way, "--budget-bits", str(options.budget_bits)]
    command += [*["--real"] * options.real, *["--amp"] * options.amp]
    with tempfile.TemporaryDirectory() as folder:
        none = {
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
            "PYTHONWARNINGS": "ignore::UserWarning",  # that caches are off
        }
        child = subprocess.run(command, env={**os.environ, **none}, stdout=subprocess.PIPE, text=True, check=True)
    return float(child.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["bert", "gpt2", "resnet50"])
    parser.add_argument("--budget-bits", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--real", action="store_true", help="at the sizes that people train, without sample batches")
    parser.add_argument("--amp", action="store_true", help="under bfloat16 autocast")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)  # measure here, print seconds
    options = parser.parse_args()
    if options.child:
        numbers = options.networks[0], options.budget_bits
        print(first_step(options.child, *numbers, real=options.real, amp=options.amp))
        return
    print(f"seconds until the first compiled step is done, budget_bits={options.budget_bits:g}; {describe()}")
    print(f"{'network':10} {'torch.compile':>14} {'gact_fx':>9} {'ratio':>7}")
    results = {}
    for name in options.networks:
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.repeats):
            for way, values in seconds.items():
                values.append(first_step_elsewhere(way, name, options))
        results[name] = seconds
        plain, compressed = (statistics.median(values) for values in seconds.values())
        print(f"{name:10} {plain:14.1f} {compressed:9.1f} {compressed / plain:6.2f}x", flush=True)
    save(f"first-step-{options.budget_bits:g}bits{'-real' * options.real}{'-bf16' * options.amp}", results)


if __name__ == "__main__":
    main()
