"""Weigh what the pair has in memory before anything is stored in codes: what the report compares with."""

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.step_memory import PairMemory, pair_memory
from gact_fx.passes.pipeline import Context


def weigh_exact_pair(pair: GraphPair, context: Context) -> PairMemory:
    """The buffers of the pair as the partitioner left it."""
    return pair_memory(pair, fused=context.config.inner == "inductor")
