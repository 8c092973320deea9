"""Copy the pair for those who replay it: profiling and the measurement of the gradient's error."""

from dataclasses import replace

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import copy_module
from gact_fx.passes.pipeline import Context


def copy_for_replay(pair: GraphPair, context: Context) -> GraphPair:
    """The pair as it is now, all on one device and with the codec's operators as they are."""
    return replace(pair, forward=copy_module(pair.forward), backward=copy_module(pair.backward))
