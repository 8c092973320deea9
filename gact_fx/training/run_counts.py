"""How often each compiled graph runs in a training step: as many copies of its activations are held at once."""

from collections import Counter
from collections.abc import Hashable
from typing import Any

from gact_fx.graphs.compilers import Compiled, boxed
from gact_fx.profiling.tape import MAX_WAITING


class RunCounts:
    """Counts the runs of graphs, known by a key.

    A step ends where forward follows on backward. What does not run any more (graphs of a size that was traced anew) is
    not current; a graph gets as many steps to come round again as there are graphs, since checkpointing outside of the
    compiled graphs has them take turns.
    """

    def __init__(self) -> None:
        self._step = 0
        self._in_backward = False
        self._forwards: Counter[Hashable] = Counter()
        self._backwards: Counter[Hashable] = Counter()
        self._latest: dict[Hashable, int] = {}
        self._last_step: dict[Hashable, int] = {}

    def forward(self, run: Compiled, key: Hashable) -> Compiled:
        """``run``, the forward graph ``key``, counted."""

        def call(arguments: list[Any]) -> Any:
            if self._in_backward:
                self._step += 1
                self._in_backward = False
                self._forwards.clear()
                self._backwards.clear()
            self._forwards[key] += 1
            self._last_step[key] = self._step
            return run(arguments)

        return boxed(call)

    def backward(self, run: Compiled, key: Hashable) -> Compiled:
        """``run``, the backward graph ``key``, counted."""

        def call(arguments: list[Any]) -> Any:
            self._in_backward = True
            self._backwards[key] += 1
            self._latest[key] = self._backwards[key]
            return run(arguments)

        return boxed(call)

    def runs(self, key: Hashable) -> int:
        """Runs in the latest step; before the first backward pass, runs so far; 1 where backward is out of sight."""
        return self._latest.get(key) or (0 if self.backward_is_unseen else self._forwards[key]) or 1

    @property
    def backward_is_unseen(self) -> bool:
        """Whether graphs run forward time and again and never backward: compiled autograd does that without them."""
        return not self._latest and any(count > MAX_WAITING for count in self._forwards.values())

    def is_current(self, key: Hashable) -> bool:
        """Whether the graph belongs to the training steps of late."""
        return self._step - self._last_step.get(key, self._step) <= len(self._last_step)
