"""Which operators cost about as much as reading their inputs: those that backward may run again."""

import torch
from torch import fx

from gact_fx.graphs.operator_table import CASTS, CONSTANTS, MOVES
from gact_fx.graphs.operators import HigherOrderOperator, OpOverload, name_of
from gact_fx.passes.find_masks import counts, draws, is_known

_CHEAP = MOVES | CONSTANTS | CASTS
# By name: Inductor registers some of them when it is first used.
_CHEAP_PRIMS = frozenset(
    {"convert_element_type", "iota", "broadcast_in_dim", "fma", "inductor_lookup_seed", "inductor_random",
     "inductor_randint"}
)  # fmt: skip


def is_cheap(node: fx.Node) -> bool:
    """Whether computing ``node`` again costs about as much as reading its inputs, and gives the same from rounded ones
    up to rounding.
    """
    if node.op != "call_function" or draws(node) or counts(node) or not is_known(node):
        return False
    if isinstance(node.target, HigherOrderOperator):
        return False
    if not isinstance(node.target, OpOverload):  # getitem, or arithmetic of sizes
        return True
    if node.target.namespace == "prims":
        return name_of(node.target) in _CHEAP_PRIMS
    return torch.Tag.pointwise in node.target.tags or node.target.overloadpacket in _CHEAP
