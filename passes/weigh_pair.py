"""Weigh what the rewritten pair has in memory while it runs: the peak of a step is predicted from it."""

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.step_memory import PairMemory, pair_memory
from gact_fx.passes.pipeline import Context


def weigh_pair(pair: GraphPair, context: Context) -> PairMemory:
    """The buffers of the pair that the inner compiler gets."""
    return pair_memory(pair, fused=context.config.inner == "inductor")
