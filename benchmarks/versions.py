"""Two versions of gact_fx side by side: step time, time to the first step, and profiling, as ratios of new to old.

    python benchmarks/versions.py OLD [--steps 30] [--repeats 3] [--budget-bits 4] [NETWORK ...]

OLD is a folder that holds the other version's package as it is built (``setup.py build_py --build-lib OLD``, with the
extension beside it); the new version is the installed one. Each version runs in a process of its own, and the two take
turns: step by step, profiling by profiling, and first steps each in a fresh process with an empty cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from typing import IO, cast

from machine import describe, save

FRESH = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "PYTHONWARNINGS": "ignore::UserWarning"}


def serve(network: str, budget_bits: float) -> None:
    """In a child: read commands, write seconds."""
    import time

    from first_step import first_step
    from profiling import profile_seconds
    from step import stepper

    step = None
    for line in sys.stdin:
        command = line.strip()
        if command == "step":
            step = step or stepper(network, budget_bits)
            start = time.perf_counter()
            step()
            seconds = time.perf_counter() - start
        elif command == "profiling":
            seconds = profile_seconds(network)[0]
        else:
            seconds = first_step("gact_fx", network, budget_bits)
        print(f"seconds {seconds}", flush=True)


class Version:
    """One version in a process of its own; ``folder`` holds its package, None: the installed one."""

    def __init__(self, folder: str | None, network: str, budget_bits: float, **environment: str) -> None:
        path = {} if folder is None else {"PYTHONPATH": os.path.abspath(folder)}
        command = [sys.executable, __file__, "-", network, "--budget-bits", str(budget_bits), "--child"]
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **path, **environment},
        )

    def seconds(self, command: str) -> float:
        """What the child takes for "step", "profiling" or "first step"."""
        stdin, stdout = cast(IO[str], self._child.stdin), cast(IO[str], self._child.stdout)
        print(command, file=stdin, flush=True)
        for line in stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError(f"the child ended with {self._child.wait()}; run it with --child to see why")

    def close(self) -> None:
        cast(IO[str], self._child.stdin).close()
        self._child.wait()


def side_by_side(old: str, network: str, budget_bits: float, command: str, count: int) -> list[tuple[float, float]]:
    """Seconds of both versions, which take turns; the first turn warms up."""
    versions = [Version(folder, network, budget_bits) for folder in (old, None)]
    found = []
    for turn in range(count + 1):
        # The one that goes second finds other caches: they change places.
        order = versions if turn % 2 else versions[::-1]
        seconds = {version: version.seconds(command) for version in order}
        found.append((seconds[versions[0]], seconds[versions[1]]))
    for version in versions:
        version.close()
    return found[1:]


def first_steps(old: str, network: str, budget_bits: float, count: int) -> list[tuple[float, float]]:
    """Seconds to the first step of both versions, each in a fresh process with an empty cache."""
    found = []
    for turn in range(count):
        seconds = {}
        for folder in (old, None) if turn % 2 else (None, old):
            with tempfile.TemporaryDirectory() as cache:
                version = Version(folder, network, budget_bits, TORCHINDUCTOR_CACHE_DIR=cache, **FRESH)
                seconds[folder] = version.seconds("first step")
                version.close()
        found.append((seconds[old], seconds[None]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="folder with the other version's package")
    parser.add_argument("networks", nargs="*", default=["bert", "resnet50"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget-bits", type=float, default=4.0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.child:
        serve(options.networks[0], options.budget_bits)
        return
    print(f"new against old at budget_bits={options.budget_bits:g}; {describe()}")
    print(f"{'network':10} {'what':12} {'old':>9} {'new':>9} {'ratio':>7}")
    results: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for network in options.networks:
        asked = (options.old, network, options.budget_bits)
        runs = {
            "step": side_by_side(*asked, "step", options.steps),
            "profiling": side_by_side(*asked, "profiling", options.repeats),
            "first step": first_steps(*asked, options.repeats),
        }
        results[network] = runs
        for what, pairs in runs.items():
            old, new = (statistics.median(values) for values in zip(*pairs, strict=True))
            ratio = statistics.median(b / a for a, b in pairs)
            print(f"{network:10} {what:12} {old:9.3f} {new:9.3f} {ratio:6.3f}x", flush=True)
    save("versions", results)


if __name__ == "__main__":
    main()
