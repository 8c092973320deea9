"""Call the sigmoid by its name, in the joint graph: ``x / (1 + exp(-y))`` becomes ``x * sigmoid(y)``.

PyTorch decomposes SiLU, and so Swish and the gates of a Llama, into a quotient. Its exponential overflows, and where
that is coded it has the range of its largest element; the analyses would have to be told that the quotient mends both.
A sigmoid is a number for every number, and smooth.
"""

import torch
from torch import fx

from gact_fx.graphs.aot import JointGraph
from gact_fx.graphs.edit import add_call
from gact_fx.passes.pipeline import Context

aten = torch.ops.aten


def name_sigmoids(joint: JointGraph, context: Context) -> None:
    """Edit the joint graph in place."""
    graph = joint.joint.graph
    for quotient in graph.find_nodes(op="call_function", target=aten.div.Tensor):
        numerator, y = quotient.args[0], _exponent(quotient.args[1])
        if y is None or not isinstance(numerator, fx.Node) or quotient.kwargs:
            continue
        with graph.inserting_before(quotient):
            sigmoid = add_call(graph, aten.sigmoid.default, (y,), f"{quotient.name}_sigmoid")
            product = add_call(graph, aten.mul.Tensor, (numerator, sigmoid), f"{quotient.name}_product")
        for node in (sigmoid, product):
            node.meta = {**quotient.meta, "val": node.meta["val"]}
        quotient.replace_all_uses_with(product)


def _exponent(node: object) -> fx.Node | None:
    """y, where ``node`` is ``1 + exp(-y)``."""
    if not isinstance(node, fx.Node) or node.target is not aten.add.Tensor or node.kwargs or node.args[1] != 1:
        return None
    exp = node.args[0]
    negative = exp.args[0] if isinstance(exp, fx.Node) and exp.target is aten.exp.default else None
    if not isinstance(negative, fx.Node) or negative.target is not aten.neg.default:
        return None
    y: fx.Node = negative.args[0]  # type: ignore[assignment]
    return y
