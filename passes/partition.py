"""Cut the joint graph into forward and backward."""

from gact_fx.graphs.aot import GraphPair, JointGraph
from gact_fx.passes.pipeline import Context


def partition(joint: JointGraph, context: Context) -> GraphPair:
    """The pair that PyTorch's min-cut partitioner makes, given what `mark_recomputation` has marked."""
    return joint.partition(is_free=context.is_free, copies=context.copies)
