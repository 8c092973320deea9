"""Call the sigmoid by its name, in the joint graph: ``x / (1 + exp(-y))`` becomes ``x * sigmoid(y)``.

PyTorch decomposes SiLU, and so Swish and the gates of a Llama, into such a quotient, and torch 2.11 its derivative into
a reciprocal. The exponential overflows, and where it is coded it has the range of its largest element; the analyses
would have to be told that the quotient mends both. A sigmoid is a number for every number, and smooth.
"""

from typing import Any

import torch
from torch import fx

from gact_fx.graphs.aot import JointGraph
from gact_fx.graphs.edit import add_call
from gact_fx.graphs.operators import name_of
from gact_fx.passes.pipeline import Context

aten = torch.ops.aten


def name_sigmoids(joint: JointGraph, context: Context) -> None:
    """Edit the joint graph in place."""
    graph = joint.joint.graph
    for target in (aten.div.Tensor, aten.reciprocal.default):
        for quotient in graph.find_nodes(op="call_function", target=target):
            *numerator, denominator = quotient.args
            y = _exponent(denominator)
            if y is None or quotient.kwargs or not all(isinstance(x, fx.Node) for x in numerator):
                continue
            with graph.inserting_before(quotient):
                last = _add(graph, quotient, aten.sigmoid.default, y)
                for x in numerator:
                    last = _add(graph, quotient, aten.mul.Tensor, x, last)
            quotient.replace_all_uses_with(last)


def _add(graph: fx.Graph, of: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A call that is a part of what the node ``of`` was."""
    found = add_call(graph, target, args, f"{of.name}_{name_of(target)}")
    found.meta = {**of.meta, "val": found.meta["val"]}
    return found


def _exponent(node: object) -> fx.Node | None:
    """y, where ``node`` is ``1 + exp(-y)``."""
    if not isinstance(node, fx.Node) or node.target is not aten.add.Tensor or node.kwargs or node.args[1] != 1:
        return None
    (exp,) = node.all_input_nodes
    if exp.target is not aten.exp.default or exp.all_input_nodes[0].target is not aten.neg.default:
        return None
    return exp.all_input_nodes[0].all_input_nodes[0]
