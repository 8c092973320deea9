"""Peak of live memory over one training step, from the allocator's own events: what decides the largest batch.

Unlike activation_bytes.py, which counts what autograd holds between forward and backward, this counts everything that
the step allocates: transients, gradients, decoded copies, and what a library keeps back. On the CPU it replays the
allocation events of torch.profiler (exact, whatever malloc does with freed pages); on CUDA it reads the caching
allocator.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

_MARK = "gact_fx: backward begins"


@dataclass(frozen=True)
class Peak:
    """Bytes above what was live when the step began."""

    forward: int  # highest during forward
    held: int  # live when backward begins
    backward: int  # highest during backward
    left: int  # live after the step: gradients, and what somebody kept

    @property
    def step(self) -> int:
        return max(self.forward, self.backward)


def peak_bytes(loss_of: Callable[[], torch.Tensor], device: str = "cpu") -> Peak:
    """Run ``loss_of()`` and its backward once. Set ``p.grad`` to None before, so that gradients count once."""
    if device == "cuda":
        return _on_cuda(loss_of)
    from torch.profiler import ProfilerActivity, profile, record_function

    # Garbage in cycles that Python finds during the step would be taken off what the step allocates.
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        loss = loss_of()
        with record_function(_MARK):
            pass
        loss.backward()
        del loss
        # What a model returns may hold itself, as that of transformers does, until Python looks for such cycles.
        gc.collect()
    events = []
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            events.append((event.start_ns(), event.nbytes()))
        elif event.name() == _MARK:
            events.append((event.start_ns(), None))
    live, held, highest, phase = 0, 0, [0, 0], 0
    for _, change in sorted(events, key=lambda event: event[0]):
        if change is None:
            phase, held = 1, live
            highest[1] = live
        else:
            live += change
            highest[phase] = max(highest[phase], live)
    return Peak(highest[0], held, highest[1], live)


def _on_cuda(loss_of: Callable[[], torch.Tensor]) -> Peak:
    gc.collect()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = loss_of()
    torch.cuda.synchronize()
    forward, held = torch.cuda.max_memory_allocated() - base, torch.cuda.memory_allocated() - base
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    del loss
    gc.collect()
    torch.cuda.synchronize()
    return Peak(forward, held, torch.cuda.max_memory_allocated() - base, torch.cuda.memory_allocated() - base)
