"""Cast gradients at the end of backward: until then they wait in the bytes of what they are cast from.

Under autocast a matrix product gives a weight's gradient in 16 bits, and a cast follows, since the weight has 32.
Nobody but the caller reads the cast. Behind everything else, one cast after another, the gradients take half of their
bytes while activations are in memory.
"""

from operator import getitem

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import elements_nbytes
from gact_fx.graphs.fused_loops import is_of_library
from gact_fx.graphs.live_memory import nbytes
from gact_fx.graphs.operator_table import CASTS
from gact_fx.graphs.operators import packet_of, returns_alias
from gact_fx.passes.pipeline import Context


def cast_late(pair: GraphPair, context: Context) -> None:
    """Move widening casts of what a library computes, which backward returns, to its end."""
    cast_gradients_late(pair.backward.graph)


def cast_gradients_late(graph: fx.Graph) -> None:
    """The same for one graph."""
    output = graph.output_node()
    for node in list(graph.nodes):
        if packet_of(node) in CASTS and set(node.users) == {output} and _widens(node):
            output.prepend(node)


def _widens(cast: fx.Node) -> bool:
    """Whether what ``cast`` reads is narrower, a library's result, and all that there is in its memory."""
    source = cast.all_input_nodes[0]
    base = source
    while base.op == "call_function" and (base.target is getitem or returns_alias(base.target)):
        base = base.all_input_nodes[0]
    narrow, wide = source.meta.get("val"), cast.meta.get("val")
    if not isinstance(narrow, torch.Tensor) or not isinstance(wide, torch.Tensor) or not is_of_library(base):
        return False
    is_whole = nbytes(source) == elements_nbytes(source)
    return is_whole and narrow.dtype.itemsize < wide.dtype.itemsize
