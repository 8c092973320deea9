"""Derivatives with respect to nodes of a graph, which wait for the segment that goes on with them, in 6 bits."""

from collections.abc import Mapping
from itertools import count

import torch
from torch import fx

from gact_fx.codec.packed_tensors import Packed, pack

# One derivative per probe.
Slopes = list[torch.Tensor]
# The same as they wait.
Waiting = list[Packed | torch.Tensor]
BITS = 6


class WaitingSlopes:
    """By node, one derivative per probe: the sum of all that arrive.

    Codes have no bias, and next to the chance in a probe's signs their noise is small: of normal numbers 0.1 % of the
    squared norm.
    """

    def __init__(self) -> None:
        self._waiting: dict[fx.Node, Waiting] = {}
        self._seeds = count()

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._waiting

    def add(self, node: fx.Node, probe: int, slope: torch.Tensor) -> None:
        """One part of the derivative of ``probe``; the first parts come in the order of the probes."""
        found = self._waiting.setdefault(node, [])
        if probe < len(found):
            found[probe] = self._pack(unpacked(found[probe]) + slope)
        else:
            found.append(self._pack(slope))

    def take(self, node: fx.Node) -> Waiting:
        """The derivatives of all probes as they wait, which do so no more; none if nothing arrived."""
        return self._waiting.pop(node, [])

    def snapshot(self) -> dict[fx.Node, Waiting]:
        """What waits now, to be restored."""
        return {node: list(waiting) for node, waiting in self._waiting.items()}

    def restore(self, snapshot: dict[fx.Node, Waiting]) -> None:
        """Have that wait, and nothing else, which did when the snapshot was taken."""
        self._waiting = snapshot

    def put_back(self, taken: Mapping[fx.Node, Waiting]) -> None:
        """Have what was taken wait again."""
        self._waiting.update(taken)

    def of_placeholders(self) -> dict[str, Waiting]:
        """The derivatives with respect to the graph's inputs, by name, as they wait."""
        return {node.name: waiting for node, waiting in self._waiting.items() if node.op == "placeholder"}

    def _pack(self, slope: torch.Tensor) -> Packed | torch.Tensor:
        return pack(slope, next(self._seeds), BITS)


def unpacked(waiting: Packed | torch.Tensor) -> torch.Tensor:
    return waiting.unpack() if isinstance(waiting, Packed) else waiting
