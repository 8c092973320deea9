"""Which graph holds what of the activations that others hold as well: each is to be counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from gact_fx.graphs.compilers import Compiled, boxed
from gact_fx.graphs.tensors import StorageWeakRef, is_plain, storage_key
from gact_fx.plan import GraphPlan
from gact_fx.records import KEEP, QUANTIZE, Eligibility, GraphAnalysis, SavedTensor

# A graph, and the slot of a tensor that it saves.
Slot = tuple[Hashable, str]


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
        self._runs: Counter[Slot] = Counter()
        self._first_before: Counter[Slot] = Counter()
        self._first_after: Counter[Slot] = Counter()

    def add(self, slot: Slot, x: torch.Tensor, *, is_exact: bool) -> None:
        """``slot`` holds ``x``, or codes of it."""
        storage = self._numbers.number(x)
        self._runs[slot] += 1
        self._first_before[slot] += storage not in self.storages
        self._first_after[slot] += not (is_exact and storage in self.exact)
        self.storages.add(storage)
        if is_exact:
            self.exact.add(storage)

    def shares_of_runs(self) -> Mapping[Slot, tuple[float, float]]:
        """In which share of its runs a slot was the first to hold the activation's memory, and what is stored of it."""
        return {
            slot: (self._first_before[slot] / runs, self._first_after[slot] / runs) for slot, runs in self._runs.items()
        }


def noting_holdings(
    run: Compiled,
    graph: Hashable,
    analysis: GraphAnalysis,
    plan: GraphPlan,
    current: Callable[[], GraphHoldings | None],
) -> Compiled:
    """``run``, the forward graph ``graph``, noting in ``current()`` the activations that it holds."""
    entries = plan.entries()

    def is_exact(tensor: SavedTensor, how: Eligibility) -> bool:
        return how.encoding == KEEP or (
            how.encoding == QUANTIZE and how.values and entries[tensor.key].bits is None and not how.instead
        )

    crossing = [
        (tensor.boundary, (graph, tensor.name), is_exact(tensor, how))
        for tensor, how in zip(analysis.saved, analysis.eligibility, strict=True)
        if tensor.boundary is not None
    ]

    def call(arguments: list[Any]) -> Any:
        holdings = current()
        if holdings is None:
            return run(arguments)
        # The list is emptied.
        inputs = {b.position: arguments[b.position] for b, *_ in crossing if b.is_input}
        outputs = run(arguments)
        for boundary, slot, stays in crossing:
            x = inputs[boundary.position] if boundary.is_input else outputs[boundary.position]
            if is_plain(x):
                holdings.add(slot, x, is_exact=stays)
        return outputs

    return boxed(call)
