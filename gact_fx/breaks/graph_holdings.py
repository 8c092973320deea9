"""Which graph holds what of the activations that others hold as well: each is to be counted once."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from gact_fx.graphs.compilers import Compiled, boxed
from gact_fx.graphs.tensors import StorageWeakRef, is_plain, storage_key
from gact_fx.records import Boundary

# A graph, and the slot of a tensor that it saves.
Holding = tuple[Hashable, str]


class Storages:
    """The storages seen in one forward pass, numbered: they may take turns at one address. ``sizes`` are in bytes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def number(self, x: torch.Tensor) -> int:
        """The position of the storage of ``x`` in ``sizes``."""
        key, storage = storage_key(x), x.untyped_storage()
        known = self._known.get(key)
        if known is not None and not known[0].expired():
            return known[1]
        self._known[key] = StorageWeakRef(storage), len(self.sizes)
        self.sizes.append(storage.nbytes())
        return len(self.sizes) - 1


class GraphHoldings:
    """What the graphs of one forward pass hold of activations that cross from graph to graph.

    ``storages`` are the numbers of their storages, ``exact`` of those that stay as they are.
    """

    def __init__(self, storages: Storages) -> None:
        self.storages: set[int] = set()
        self.exact: set[int] = set()
        self._numbers = storages
        self._runs: Counter[Holding] = Counter()
        self._first_before: Counter[Holding] = Counter()
        self._first_after: Counter[Holding] = Counter()

    def add(self, holding: Holding, x: torch.Tensor, *, is_exact: bool) -> None:
        """A graph holds ``x`` in a slot, or codes of it."""
        storage = self._numbers.number(x)
        self._runs[holding] += 1
        self._first_before[holding] += storage not in self.storages
        self._first_after[holding] += not (is_exact and storage in self.exact)
        self.storages.add(storage)
        if is_exact:
            self.exact.add(storage)

    def shares_of_runs(self) -> Mapping[Holding, tuple[float, float]]:
        """In which share of its runs a slot was the first to hold the activation's memory, and what is stored of it."""
        return {
            holding: (self._first_before[holding] / runs, self._first_after[holding] / runs)
            for holding, runs in self._runs.items()
        }


def noting_holdings(
    run: Compiled, crossing: Sequence[tuple[Boundary, Holding, bool]], current: Callable[[], GraphHoldings | None]
) -> Compiled:
    """``run``, a forward graph, noting in ``current()`` the activations that it holds.

    ``crossing`` says of those that others may hold as well where they lie, in which slots they are saved, and whether
    they stay as they are.
    """

    def call(arguments: list[Any]) -> Any:
        holdings = current()
        if holdings is None:
            return run(arguments)
        # The list is emptied.
        inputs = {b.position: arguments[b.position] for b, *_ in crossing if b.is_input}
        outputs = run(arguments)
        for boundary, holding, stays in crossing:
            x = inputs[boundary.position] if boundary.is_input else outputs[boundary.position]
            if is_plain(x):
                holdings.add(holding, x, is_exact=stays)
        return outputs

    return boxed(call)
