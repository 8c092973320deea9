"""Measures how much memory tensors take, as PyTorch's allocators tell it.

Undocumented, tried with torch 2.13: ``profiler.kineto_results.events()`` of ``torch.profiler.profile``, with ``name``,
``start_ns``, ``nbytes`` and ``device_type`` (public would be every allocation in ``profile.events()``, which leaves out
those of operators).
"""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass
class MeasuredPeak:
    """The most bytes that are live at a time above those at the beginning; None until that was measured."""

    nbytes: int | None = None


@contextlib.contextmanager
def peak_meter(device: torch.device) -> Iterator[MeasuredPeak]:
    """Measure what is allocated within on ``device``; on CUDA this starts the allocator's peak anew."""
    found = MeasuredPeak()
    # Garbage in cycles that Python finds within would be taken off what is allocated there.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        torch.cuda.synchronize(device)
        found.nbytes = torch.cuda.max_memory_allocated(device) - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield found
    results: Any = recorded.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.device_type().name == "CPU"]
    changes.sort(key=lambda change: change[0])
    found.nbytes = max(accumulate((nbytes for _, nbytes in changes), initial=0))
