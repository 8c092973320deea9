"""``gact_fx.measure_peak``: what a step of training takes at its peak, measured."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gact_fx.graphs.memory_meter import MeasuredPeak, peak_meter
from gact_fx.training.lifecycle import State
from gact_fx.training.model import owned_by, sessions_within


@contextlib.contextmanager
def measure_peak(model: Callable[..., Any]) -> Iterator[MeasuredPeak]:
    """Measure the memory of the step of training that runs within: its peak, in bytes.

    ``with gact_fx.measure_peak(model) as peak: loss_fn(model, batch).backward()`` leaves in ``peak.nbytes`` the most
    that was live at a time above what was there at the beginning, on the device of the model's first parameter. The
    gradients that the step makes are included; have none there before (``optimizer.zero_grad()``), or they count as
    well while they are added up. ``gact_fx.inspect(model).peak_measured`` has the figure until there is another plan,
    if the step ran by a plan. Let a step by the plan run before, since the first one compiles.

    On CUDA the allocator's peak (``torch.cuda.max_memory_allocated``) starts anew. On the CPU ``torch.profiler`` notes
    every allocation, which makes the step slower. The model may also be one that gact_fx did not compile.

    Raises:
        RuntimeError: on the CPU, a profiler of PyTorch runs already.
    """
    sessions = list(sessions_within(model).values())
    for session in sessions:
        # What the last step left to be measured is no part of this one.
        session.settle()
    by_plan = [session.run_counts for session in sessions if session.lifecycle.state is State.PLANNED]
    device = next((x.device for x in owned_by(model)), torch.get_default_device())
    with peak_meter(device) as found:
        yield found
    for counts in by_plan:
        counts.note_peak(found.nbytes)
