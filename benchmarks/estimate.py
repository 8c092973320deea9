"""What ``gact_fx.estimate`` says before training, against what a planned step then takes.

    python benchmarks/estimate.py [--budget-bits 4] [--inner inductor] [NETWORK ...]

Peaks are those of ``peak_bytes.py`` (every allocation counts, gradients included), held bytes those of
``gact_fx.inspect`` on the planned model, and of ``activation_bytes.py`` under torch.compile, without what the loss
function itself holds outside of the model. Networks are those of ``networks.py``, ``real_networks.py`` and, with the
prefix "zoo:", ``zoo_networks.py``. Each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import networks
import real_networks
import zoo_networks
from activation_bytes import activation_bytes
from machine import describe, save
from networks import Network
from peak_bytes import peak_bytes

import gact_fx

NETWORKS = ("bert", "gpt2", "llama", "resnet50", "swin", "unet", "zoo:t5", "zoo:vit", "zoo:qwen3", "zoo:convnext")


def fresh(name: str) -> Network:
    if name.startswith("zoo:"):
        return zoo_networks.build(name.removeprefix("zoo:"))
    return real_networks.build(name) if name == "unet" else networks.build(name)


def measure(name: str, bits: float, inner: str) -> dict[str, float]:
    """Estimated and measured bytes of one network, and the seconds of the estimate."""
    model, batch, loss_fn = fresh(name)
    start = time.perf_counter()
    found = gact_fx.estimate(model, batch, budget_bits=bits, loss_fn=loss_fn, inner=inner)
    seconds = time.perf_counter() - start
    plain, batch, loss_fn = fresh(name)
    plain.compile(backend={"inductor": "inductor", "eager": "aot_eager"}[inner])
    held_plain = activation_bytes(
        loss_fn(plain, batch), exclude=[*plain.parameters(), *plain.buffers(), *batch.values()]
    )
    gact_fx.compile(model, budget_bits=bits, inner=inner)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        loss_fn(model, batch).backward()
    model.zero_grad(set_to_none=True)
    peak = peak_bytes(lambda: loss_fn(model, batch))
    report = gact_fx.inspect(model)
    return {
        "peak": found.peak, "measured_peak": peak.step, "held": found.held, "measured_held": report.bytes_after,
        "held_plain": found.held_plain, "measured_held_plain": held_plain, "seconds": seconds,
    }  # fmt: skip


def measure_elsewhere(name: str, bits: float, inner: str) -> dict[str, float]:
    """What :func:`measure` finds in a fresh process."""
    command = [sys.executable, __file__, name, "--child", "--budget-bits", str(bits), "--inner", inner]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--budget-bits", type=float, default=4.0)
    parser.add_argument("--inner", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # measure here, print JSON
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.networks[0], options.budget_bits, options.inner)))
        return
    print(f"MB estimated and measured at budget_bits={options.budget_bits:g}, inner={options.inner}; {describe()}")
    print(f"{'network':12} {'peak':>19} {'':>7} {'held':>19} {'':>7} {'torch.compile':>19} {'':>7} {'seconds':>8}")
    results: dict[str, dict[str, float]] = {}
    for name in options.networks:
        found = results[name] = measure_elsewhere(name, options.budget_bits, options.inner)
        cells = []
        for kind in ("peak", "held", "held_plain"):
            guess, real = found[kind], found[f"measured_{kind}"]
            cells.append(f"{guess / 1e6:9.2f} {real / 1e6:9.2f} {100 * (guess / real - 1):+6.1f}%")
        print(f"{name:12} {' '.join(cells)} {found['seconds']:8.1f}", flush=True)
        save(f"estimate-{options.budget_bits:g}bits-{options.inner}", results)


if __name__ == "__main__":
    main()
