"""Changes of gradients in one training step, on their way from late graphs to early ones and to leaves."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from gact_fx.profiling.gradients import sketch, squared_norm
from gact_fx.profiling.tape import Step


class GradientChanges:
    """What changes in the backward outputs of ``steps`` is added here, and counted where it ends.

    ``waiting``: the index of a step → what changes in its tangents, by name, as flat as it arrives.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        leaves = Counter(step.leaf(position) for step in steps for position in step.leaves)
        # What ends in one place alone need not be kept to be added up.
        self._alone = {leaf for leaf, count in leaves.items() if count == 1}
        self._leaves: dict[Hashable, torch.Tensor] = {}
        self._total = 0.0
        self.waiting: dict[int, dict[str, torch.Tensor]] = {}

    def add(self, index: int, outputs: Sequence[Any]) -> None:
        """Changes of a step's backward outputs; None where nothing changes."""
        for position, value in enumerate(outputs):
            self.add_one(index, position, value)

    def add_one(self, index: int, position: int, change: Any) -> None:
        """The change of one of a step's backward outputs."""
        if not isinstance(change, torch.Tensor):
            return
        for place, leaf, part in self._steps[index].onward(position, change):
            if place is not None:
                step, tangent = place
                _add(self.waiting.setdefault(step, {}), tangent, part)
            elif leaf is not None and leaf not in self._alone:
                _add(self._leaves, leaf, sketch(part))
            else:
                self._total += squared_norm(part)

    def squared_norm(self) -> float:
        """Of what has ended, in units of squared gradient."""
        return self._total + sum(map(squared_norm, self._leaves.values()))


def compared(step: Step, position: int, value: Any) -> Any:
    """What is compared of a backward output: of a gradient that no other graph goes on with, no more than a sketch."""
    goes_on = position in step.flows or position in step.detours
    is_float = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    return sketch(value) if is_float and not goes_on else value


def difference(left: Any, right: Any) -> torch.Tensor | None:
    """Of two floating-point tensors; None for anything else, and for what is the same object."""
    is_float = isinstance(left, torch.Tensor) and left.dtype.is_floating_point
    return left - right if is_float and left is not right else None


def _add(total: dict[Any, torch.Tensor], key: Any, part: torch.Tensor) -> None:
    total[key] = total[key] + part.reshape(total[key].shape) if key in total else part
