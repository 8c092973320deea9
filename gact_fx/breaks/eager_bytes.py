"""What eager regions hold for backward in one step, as the planner counts it."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from gact_fx.breaks.forward_pass import EagerTensor


@dataclass(frozen=True)
class EagerBytes:
    """Bytes ``held`` as they are stored, and ``plain`` ones, which would be held without codes.

    ``excess`` is what codes take beyond the budget's bits an element: their width is a whole number, and the metadata
    of their groups come on top.
    """

    held: int = 0
    plain: int = 0
    excess: float = 0.0

    @classmethod
    def of(cls, tensors: Iterable[EagerTensor], budget_bits: float | None) -> "EagerBytes":
        """Those of one step's ``tensors``; ``budget_bits`` None: no excess."""
        tensors = list(tensors)
        # A code that several share is counted once.
        coded = [t for t in tensors if t.code is not None and not t.is_mask and t.bytes_after]
        taken, numel = sum(t.bytes_after for t in coded), sum(prod(t.shape) for t in coded)
        excess = 0.0 if budget_bits is None else max(taken - budget_bits / 8 * numel, 0.0)
        return cls(sum(t.bytes_after for t in tensors), sum(t.bytes_before for t in tensors), excess)
