"""25 architectures of ``transformers`` and four graph nets: do they train, in how little, and with what gradient?

    python benchmarks/zoo.py [--inner inductor] [NETWORK ...]

Of every network (``zoo_networks.py``): three training steps at 4 bits, dropout on; bytes that autograd holds for
backward (``activation_bytes.py``), in eager and at 4 bits; the number of compiled graphs; the relative error of the
whole gradient at 8 bits against eager, dropout off; and what is kept exact, with bytes and reasons. Where the error is
above 2 %, the compiler's own error (``budget_bits=None``) stands beside it, and where that is above a tenth of the
limit, both are measured again in float64: some networks, as initialised, turn float32's rounding alone into percents.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
import traceback
from dataclasses import asdict, dataclass

import torch
from gradients import relative_error
from machine import describe, save
from memory import held
from zoo_networks import NAMES, build

import gact_fx

STEPS, LEARNING_RATE = 3, 1e-3
# The targets.
MAX_ERROR, MIN_RATIO, LARGE = 0.02, 7.0, 1e6
WIDTHS = (12, 10, 9, 8, 8, 7, 8, 9)


@dataclass(frozen=True)
class Found:
    """What was measured of one network. ``refused`` are bytes kept exact at 4 bits, by reason; ``floor`` and ``dtype``
    say what the compiler's own error is, where it was asked, and in which precision both were measured.
    """

    eager_bytes: int
    bytes: int
    graphs: int
    losses: tuple[float, ...]
    error: float
    floor: float | None
    dtype: str
    refused: dict[str, int]
    seconds: float

    @property
    def ratio(self) -> float:
        return self.eager_bytes / self.bytes

    def misses(self) -> list[str]:
        """The targets that are missed."""
        found = []
        if not all(math.isfinite(loss) for loss in self.losses):
            found.append("loss")
        if not self.error <= MAX_ERROR:
            found.append("error")
        if self.eager_bytes > LARGE and self.ratio < MIN_RATIO:
            found.append("ratio")
        return found


def measure(name: str, inner: str) -> Found:
    """Train a fresh network for a few steps, and compare the gradients of others."""
    start = time.perf_counter()
    torch._dynamo.reset()
    model, batch, loss_fn = build(name)
    eager_bytes = held(model, batch, loss_fn(model, batch))
    gact_fx.compile(model, budget_bits=4, inner=inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, bytes_held = [], 0
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        bytes_held = held(model, batch, loss)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    report = gact_fx.inspect(model)
    refused: dict[str, int] = {}
    for row in report.rows:
        if row.encoding == "keep" and row.bytes_after:
            refused[row.reason] = refused.get(row.reason, 0) + row.bytes_after
    error, floor, dtype = _error(name, inner)
    return Found(
        eager_bytes=eager_bytes,
        bytes=bytes_held,
        graphs=len(report.graphs),
        losses=tuple(losses),
        error=error,
        floor=floor,
        dtype=str(dtype).removeprefix("torch."),
        refused=dict(sorted(refused.items(), key=lambda item: -item[1])),
        seconds=time.perf_counter() - start,
    )


def _error(name: str, inner: str) -> tuple[float, float | None, torch.dtype]:
    """The gradient's error at 8 bits, that of the compiler alone where it was asked, and the precision."""
    dtype, floor = torch.float32, None
    exact = gradients(name, dtype)
    error = gradient_error(name, dtype, inner, 8, exact)
    if not error <= MAX_ERROR:
        floor = gradient_error(name, dtype, inner, None, exact)
        if not floor <= MAX_ERROR / 10:
            dtype = torch.float64
            exact = gradients(name, dtype)
            error, floor = (gradient_error(name, dtype, inner, bits, exact) for bits in (8, None))
    return error, floor, dtype


def gradients(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Eager PyTorch's gradients of a fresh network's first step, dropout off."""
    model, batch, loss_fn = build(name, dropout=False, dtype=dtype)
    loss_fn(model, batch).backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def gradient_error(
    name: str, dtype: torch.dtype, inner: str, budget_bits: float | None, exact: dict[str, torch.Tensor]
) -> float:
    """The relative error of a fresh compiled network's whole gradient; infinite where other parameters have one."""
    torch._dynamo.reset()
    model, batch, loss_fn = build(name, dropout=False, dtype=dtype)
    samples = None if budget_bits is None else [batch]
    gact_fx.compile(
        model, budget_bits=budget_bits, inner=inner, sample_batches=samples, loss_fn=loss_fn if samples else None
    )
    loss_fn(model, batch).backward()
    found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    if found.keys() != exact.keys():
        return math.inf
    return relative_error(list(found.values()), [exact[key] for key in found])


def row(name: str, found: Found) -> str:
    """A line of the table."""
    floor = "" if found.floor is None else f"{found.floor:.2%}"
    kept = sum(found.refused.values())
    cells = (
        name, f"{found.eager_bytes / 1e6:.2f} MB", f"{found.bytes / 1e6:.2f} MB", f"{found.ratio:.1f}x",
        str(found.graphs), f"{found.error:.2%}", floor, f"{kept / 1e3:.1f} kB",
    )  # fmt: skip
    notes = [f"misses: {', '.join(found.misses())}"] if found.misses() else []
    notes += [f"gradients in {found.dtype}"] if found.dtype != "float32" else []
    notes += [f"{size / 1e3:.1f} kB {reason}" for reason, size in found.refused.items()]
    return _line(cells) + "  " + "; ".join(notes)


def _line(cells: tuple[str, ...]) -> str:
    return f"{cells[0]:{WIDTHS[0]}} " + " ".join(f"{c:>{w}}" for c, w in zip(cells[1:], WIDTHS[1:], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NAMES, metavar="NETWORK", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--inner", choices=("inductor", "eager"), default="inductor")
    options = parser.parse_args()
    if unknown := set(options.networks) - set(NAMES):
        parser.error(f"no network {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print(f"inner={options.inner}; {describe()}")
    print(_line(("network", "eager", "4 bits", "ratio", "graphs", "error", "floor", "exact")) + "  of that, and why")
    results, failed = {}, []
    for name in options.networks:
        try:
            found = measure(name, options.inner)
        except Exception as error:
            # One network that fails must not hide what the others do.
            failed.append(name)
            traceback.print_exc()
            print(f"{name:{WIDTHS[0]}} FAILED: {type(error).__name__}", flush=True)
            continue
        results[name] = {**asdict(found), "ratio": found.ratio, "misses": found.misses()}
        print(row(name, found), flush=True)
    missed = [name for name, found in results.items() if found["misses"]]
    print(f"{len(results)} of {len(options.networks)} run; targets missed by {', '.join(missed) or 'none'}")
    if set(options.networks) == set(NAMES):
        save(f"zoo-{options.inner}", results)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
