"""Find what the plan says of the graph."""

from gact_fx.graphs.aot import GraphPair
from gact_fx.passes.pipeline import Context
from gact_fx.plan import GraphPlan


def find_plan(pair: GraphPair, context: Context) -> GraphPlan:
    """The decisions for every tensor that is to be quantized, from whoever runs the passes."""
    assert context.find_plan is not None
    return context.find_plan(context.analysis)
