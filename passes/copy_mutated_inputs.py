"""Have backward get the inputs that forward writes to as they were."""

from gact_fx.graphs.aot import JointGraph
from gact_fx.passes.pipeline import Context


def copy_mutated_inputs(joint: JointGraph, context: Context) -> frozenset[str]:
    """Edit the joint graph in place; returns the names of the copies."""
    return joint.copy_mutated_inputs()
