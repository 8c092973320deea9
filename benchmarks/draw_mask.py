"""Dropout's masks: the kernel of gact_fx beside what Inductor draws, bit for bit the same.

    python benchmarks/draw_mask.py [--turns 15]

Nanoseconds an element, medians of interleaved turns, in the instruction set that the kernel takes by itself
(GACT_FX_CPU_CAPABILITY=avx2 or baseline takes another). Inductor's time is that of one loop that draws numbers and
compares them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from machine import describe, save

from gact_fx.codec.operators import cpu_capability
from gact_fx.graphs import draw_mask  # noqa: F401  (registers the operator)

SIZE, THRESHOLD = [4, 12, 512, 512], 0.1  # the attention of GPT-2


@torch.compile
def inductor(seed: torch.Tensor) -> torch.Tensor:
    numbers: torch.Tensor = torch.ops.prims.inductor_random.default(SIZE, seed, "rand")
    return numbers > THRESHOLD


def kernel(seed: torch.Tensor) -> torch.Tensor:
    mask: torch.Tensor = torch.ops.gact_fx.draw_mask.default(seed, SIZE, THRESHOLD)
    return mask


def nanoseconds(draw: Callable[[torch.Tensor], torch.Tensor], seed: torch.Tensor) -> float:
    start = time.perf_counter()
    mask = draw(seed)
    return 1e9 * (time.perf_counter() - start) / mask.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    seed = torch.tensor(1234)
    if not torch.equal(kernel(seed), inductor(seed)):
        raise SystemExit("draw_mask.py: the masks differ")
    turns = [(nanoseconds(inductor, seed), nanoseconds(kernel, seed)) for _ in range(options.turns)]
    theirs, ours = (statistics.median(times) for times in zip(*turns, strict=True))
    ratio = statistics.median(one / other for one, other in turns)
    capability = cpu_capability() or "PyTorch code"
    print(f"ns an element, {torch.get_num_threads()} threads, {capability}; {describe()}")
    print(f"Inductor {theirs:.2f}, gact_fx {ours:.2f}: {ratio:.1f} times as fast")
    results = {"inductor": theirs, "gact_fx": ours, "ratio": ratio, "threads": torch.get_num_threads()}
    save(f"draw-mask-{capability}", results)


if __name__ == "__main__":
    main()
