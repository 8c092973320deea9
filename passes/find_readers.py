"""Find what reads the saved tensors in a way that decides how these may be stored.

What backward computes of saved values alone is measured (`gact_fx.profiling.coefficient_meter`). Where it meets a
tangent, gradients have to be linear in it: an operator that is not makes the tensors before it exact.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import is_float
from gact_fx.graphs.linearity import is_affine, is_pointwise
from gact_fx.graphs.operator_table import COMPUTED_AGAIN, NONLINEAR
from gact_fx.graphs.operators import packet_of
from gact_fx.passes.find_bends import dependents_within
from gact_fx.passes.find_masks import derivable_nodes, is_known
from gact_fx.passes.recompute_attention import recomputes

_QUERY_AND_KEY = (1, 2)


@dataclass(frozen=True)
class Readers:
    """What reads the saved tensors, or what follows from them in backward.

    ``nonlinear``: saved tensor → an operator that is not linear in it. ``unknown``: saved tensor → one of which nothing
    is known. From the rest backward computes again what it then differentiates, and which bends: ``curved`` are the
    query and key of attention, ``recurrent`` is what recurrent layers read.
    """

    nonlinear: dict[str, str]
    unknown: dict[str, str]
    curved: frozenset[str]
    recurrent: frozenset[str]


def find_readers(
    pair: GraphPair, lossy: Collection[str], masks: Collection[str], attention: Collection[str] = ()
) -> Readers:
    """The readers of the ``lossy`` saved tensors, given that the nodes in ``masks`` are exact.

    ``attention`` names the nodes of attention that backward computes again (`find_attention`).
    """
    nonlinear: dict[str, str] = {}
    unknown: dict[str, str] = {}
    curved: set[str] = set()
    recurrent: set[str] = set()
    derivable = derivable_nodes(pair)
    for placeholder in pair.backward.graph.find_nodes(op="placeholder"):
        if placeholder.name not in lossy:
            continue
        nodes = sorted(dependents_within(placeholder, derivable, masks))
        reads = [(node, user) for node in nodes for user in node.users if user.name not in masks]
        for node, user in reads:
            if not is_known(user):
                unknown.setdefault(placeholder.name, str(user.target))
            enters_attention = user.name in attention and node.name not in attention
            if enters_attention or (recomputes(user) and any(user.args[i] is node for i in _QUERY_AND_KEY)):
                curved.add(placeholder.name)
            if any(user.args[i] is node for i in COMPUTED_AGAIN.get(packet_of(user), ())):
                recurrent.add(placeholder.name)
            if _is_nonlinear(node, user, derivable):
                nonlinear.setdefault(placeholder.name, str(user.target))
    return Readers(nonlinear, unknown, frozenset(curved), frozenset(recurrent))


def _is_nonlinear(node: fx.Node, user: fx.Node, derivable: Collection[fx.Node]) -> bool:
    """Whether ``user``, beside a tangent, is not linear in ``node``."""
    for position in _positions(node, user):
        # Computed again, attention fits the query and key that it gets.
        if position in NONLINEAR.get(packet_of(user), ()) and not (position in _QUERY_AND_KEY and recomputes(user)):
            return True
    return user not in derivable and is_float(node) and is_pointwise(user) and not is_affine(user, [node])


def _positions(node: fx.Node, user: fx.Node) -> Iterator[int | str]:
    """Where among the arguments of ``user`` the value of ``node`` is."""
    yield from (index for index, argument in enumerate(user.args) if argument is node)
    yield from (name for name, argument in user.kwargs.items() if argument is node)
