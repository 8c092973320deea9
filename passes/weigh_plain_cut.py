"""Weigh what a graph would hold for backward under plain ``torch.compile``: the whole of ``budget_bytes="60%"``."""

from gact_fx.graphs.aot import JointGraph
from gact_fx.passes.find_saved_tensors import find_saved_tensors
from gact_fx.passes.graph_analysis import GraphAnalysis, held_nbytes
from gact_fx.passes.pipeline import Context


def weigh_plain_cut(joint: JointGraph, context: Context) -> int:
    """Bytes of what PyTorch's partitioner saves of a copy of the joint graph by its own rules.

    An activation of an earlier graph is left to that one, which may save it as well: shares are rather too small.
    """
    pair = joint.copy().partition(is_free=False, copies=frozenset())
    saved = find_saved_tensors(pair, context)
    own = tuple(tensor for tensor in saved if tensor.boundary is None or not tensor.boundary.is_input)
    return held_nbytes(GraphAnalysis(own), None)
