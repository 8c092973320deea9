"""Weigh what a graph would have in memory under plain ``torch.compile``: the whole of ``budget_bytes="60%"``."""

from dataclasses import replace

from gact_fx.graphs.aot import JointGraph
from gact_fx.graphs.step_memory import PairMemory, pair_memory
from gact_fx.passes.pipeline import Context


def weigh_plain_cut(joint: JointGraph, context: Context) -> PairMemory:
    """The buffers of what PyTorch's partitioner makes of a copy of the joint graph by its own rules.

    An activation of an earlier graph is left to that one, which may save it as well: shares are rather too small.
    """
    pair = joint.copy().partition(is_free=False, copies=frozenset())
    return pair_memory(replace(pair, upstream_inputs=frozenset()), fused=context.config.inner == "inductor")
