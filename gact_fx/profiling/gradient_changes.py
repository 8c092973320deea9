"""Changes of gradients in one training step, on their way from late graphs to early ones and to leaves."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from gact_fx.profiling.gradients import squared_norm
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
        changed = [(position, value) for position, value in enumerate(outputs) if isinstance(value, torch.Tensor)]
        for place, leaf, part in (end for change in changed for end in self._steps[index].onward(*change)):
            if place is not None:
                step, tangent = place
                _add(self.waiting.setdefault(step, {}), tangent, part)
            elif leaf is not None and leaf not in self._alone:
                _add(self._leaves, leaf, part)
            else:
                self._total += squared_norm(part)

    def squared_norm(self) -> float:
        """Of what has ended, in units of squared gradient."""
        return self._total + sum(map(squared_norm, self._leaves.values()))


def difference(left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
    """Of the floating-point tensors in two lists of outputs; None for the others, and for what is the same object."""
    return [
        a - b if isinstance(a, torch.Tensor) and a.dtype.is_floating_point and a is not b else None
        for a, b in zip(left, right, strict=True)
    ]


def _add(total: dict[Any, torch.Tensor], key: Any, part: torch.Tensor) -> None:
    total[key] = total[key] + part.reshape(total[key].shape) if key in total else part
