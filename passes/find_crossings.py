"""Find the activations that cross a graph break and are held for backward more than once, so as to store them once."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import networkx as nx

from gact_fx.accounting import can_share
from gact_fx.plan import graph_fingerprint
from gact_fx.records import Crossing
from gact_fx.shared_codes import Activation
from gact_fx.tape import Step

# A graph's fingerprint, and the key of a tensor that it saves.
Member = tuple[str, str]


def find_crossings(
    steps: Sequence[Step], eager: Collection[Activation], eager_bits: int
) -> dict[str, dict[str, Crossing]]:
    """By fingerprint and key: the tensors to be quantized of which a training step's graphs, or a graph and ``eager``
    PyTorch in ``eager_bits`` bits, hold the same activation.

    A tensor that is x in one run of its graph and y in another is one crossing with all that hold x or y: its graph is
    compiled for one code. What several forward passes hold is stored in each of them.
    """
    held: list[tuple[Member, Activation]] = []
    for step in steps:
        fingerprint = graph_fingerprint(step.analysis.saved)
        can_cross = {t.name: t.key for t, how in step.analysis.quantized() if can_share(t, how)}
        held += [((fingerprint, key), step.crossing[name]) for name, key in can_cross.items() if name in step.crossing]
    found: dict[str, dict[str, Crossing]] = {}
    # Which member holds which activation; nodes of the two kinds are told apart by their first item.
    for component in nx.connected_components(nx.Graph((("member", m), ("tensor", x)) for m, x in held)):
        members = [m for m, _ in held if ("member", m) in component]
        tensors = {x for kind, x in component if kind == "tensor"}
        is_held_by_eager = not tensors.isdisjoint(eager)
        if len(members) == len(tensors) and not is_held_by_eager:
            continue
        crossing = Crossing("/".join(members[0]), len(tensors), eager_bits if is_held_by_eager else 1)
        for fingerprint, key in members:
            found.setdefault(fingerprint, {})[key] = crossing
    return found
