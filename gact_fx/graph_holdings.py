"""Which graph holds what of the activations that others hold as well: each is to be counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gact_fx.accounting import shares
from gact_fx.inner import Compiled, boxed
from gact_fx.plan import GraphPlan
from gact_fx.records import KEEP, QUANTIZE, Eligibility, GraphAnalysis, SavedTensor
from gact_fx.saved_tensors import is_plain
from gact_fx.shared_codes import Identity, Order, Storages, identity, order_key

# A graph, and the slot of a tensor that it saves.
Slot = tuple[int, str]


class GraphHoldings:
    """What the graphs of one forward pass hold of activations that cross from graph to graph.

    ``storages`` are the numbers of their storages, ``exact`` of those that stay as they are.
    """

    def __init__(self, storages: Storages) -> None:
        self.storages: set[int] = set()
        self.exact: set[int] = set()
        self._numbers = storages
        self._codes: set[tuple[int, Identity, Order]] = set()
        self._runs: Counter[Slot] = Counter()
        self._first_before: Counter[Slot] = Counter()
        self._first_after: Counter[Slot] = Counter()

    def add(self, slot: Slot, x: torch.Tensor, order: Sequence[int], *, in_shared_codes: bool, is_exact: bool) -> None:
        """``slot`` holds ``x``, or codes of it in that order of dimensions."""
        storage = self._numbers.number(x)
        code = storage, identity(x), order_key(order, x.shape)
        is_held = storage in self.exact if is_exact else in_shared_codes and code in self._codes
        self._runs[slot] += 1
        self._first_before[slot] += storage not in self.storages
        self._first_after[slot] += not is_held
        self.storages.add(storage)
        if is_exact:
            self.exact.add(storage)
        if in_shared_codes:
            self._codes.add(code)

    def shares_of_runs(self) -> Mapping[Slot, tuple[float, float]]:
        """In which share of its runs a slot was the first to hold the activation's memory, and what is stored of it."""
        return {
            slot: (self._first_before[slot] / runs, self._first_after[slot] / runs) for slot, runs in self._runs.items()
        }


def noting_holdings(
    run: Compiled,
    graph: int,
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

    def in_shared_codes(tensor: SavedTensor, how: Eligibility) -> bool:
        return tensor.key in entries and shares(tensor, how, entries[tensor.key])

    crossing = [
        (tensor.boundary, (graph, tensor.name), how.order, in_shared_codes(tensor, how), is_exact(tensor, how))
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
        for boundary, slot, order, has_shared_codes, stays in crossing:
            x = inputs[boundary.position] if boundary.is_input else outputs[boundary.position]
            if is_plain(x):
                holdings.add(slot, x, order, in_shared_codes=has_shared_codes, is_exact=stays)
        return outputs

    return boxed(call)
