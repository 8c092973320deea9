"""Compute a linear layer and the cross-entropy behind it in pieces, so that no logits are there whole.

Before AOTAutograd differentiates a graph, the calls in it are those of the model's code. Where a cross-entropy reads a
linear layer by nothing but casts, views and slices of rows, as the heads of language models do, it becomes
`gact_fx.graphs.linear_cross_entropy` of the rows that the layer reads. So does ``logsumexp`` of the same logits, which
a z-loss squares. The model may scale or cap its logits in between (`scaled_logits`).

Logits that the model returns beside its loss are computed, once, and returned as they are: without a gradient, since
autograd would make one as large as they are, of zeros, where nobody uses it. `gact_fx.graphs.late_product` gives them
theirs back. Whoever reads the loss alone (``Config.loss_only``) gets NaN in their place, which take no memory.
"""

import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from gact_fx.graphs import linear_cross_entropy  # noqa: F401  (registers its operators)
from gact_fx.graphs.late_product import LateProduct
from gact_fx.passes.find_heads import Head, arguments_of, find_head, find_logsumexps, keeps_rows, value
from gact_fx.passes.scaled_logits import source_of

_OPERATOR = torch.ops.gact_fx.linear_cross_entropy.default


def split_cross_entropy(module: fx.GraphModule, *, loss_only: bool = False) -> list[LateProduct]:
    """Edit ``module``, a graph of the model's own calls, in place; returns the outputs that want a gradient."""
    graph = module.graph
    split: list[tuple[Head, fx.Node]] = []
    for loss in graph.find_nodes(op="call_function", target=F.cross_entropy):
        head = find_head(loss)
        if head is not None:
            split.append((head, _split(graph, loss, head)))
    late: list[LateProduct] = []
    # What nobody else reads is gone by now.
    for head in {head.logits: head for head, _ in split if head.logits.users}.values():
        if loss_only:
            _return_nothing(graph, head)
        elif all(user.op == "output" for user in head.logits.users):
            late += _return_late(graph, head)
    for head, call in split:
        if head.logits.users:
            _share(graph, head, call)
    if split:
        graph.lint()
        module.recompile()
    return late


# ---- Splitting ---------------------------------------------------------------------------------------------------


def _split(graph: fx.Graph, loss: fx.Node, head: Head) -> fx.Node:
    """Compute ``loss``, and the logarithms of the logits' sums of exponentials, from what the linear layer reads."""
    arguments = arguments_of(loss)
    target, weights = arguments["target"], arguments["weight"]
    hidden, weight, bias = (*head.linear.args, None)[:3]
    with graph.inserting_before(loss):
        hidden = _cast(graph, hidden, value(head.linear).dtype)
        rows = _viewed(graph, hidden, head, value(head.linear.args[0]).shape[-1])
        if head.scaling.bias is not None:
            bias = graph.call_method("reshape", (head.scaling.bias, (-1,)))
        options = (arguments["ignore_index"], arguments["label_smoothing"], head.scaling.scale, head.scaling.cap)
        both = graph.call_function(_OPERATOR, (rows, weight, bias, target, weights, None, *options))
        of_rows, lse = (graph.call_function(operator.getitem, (both, index)) for index in range(2))
        _replace(graph, loss, _reduced(graph, of_rows, arguments, value(loss).dtype))
    for other in find_logsumexps(graph, head, both):
        with graph.inserting_before(other):
            _replace(graph, other, lse)
    _erase_unused(graph, arguments["input"])
    return both


def _reduced(graph: fx.Graph, of_rows: fx.Node, arguments: dict[str, Any], dtype: torch.dtype) -> fx.Node:
    """The sum or mean of the rows' losses, of that ``dtype``, as the ``arguments`` of ``F.cross_entropy`` say."""
    if arguments["reduction"] == "none":
        return of_rows
    total = graph.call_method("sum", (of_rows,))
    if arguments["reduction"] == "sum":
        return total
    target, weights = arguments["target"], arguments["weight"]
    counts = graph.call_function(torch.ne, (target, arguments["ignore_index"]))
    if weights is not None:
        index = graph.call_function(torch.where, (counts, target, 0))
        own = graph.call_function(operator.getitem, (weights, index))
        # Of many rows, a sum in 16 bits would be rounded.
        wide = graph.call_method("to", (own, torch.promote_types(value(weights).dtype, torch.float32)))
        counts = graph.call_function(operator.mul, (wide, counts))
    mean = graph.call_function(operator.truediv, (total, graph.call_method("sum", (counts,))))
    return mean if weights is None else graph.call_method("to", (mean, dtype))


def _share(graph: fx.Graph, head: Head, call: fx.Node) -> None:
    """Have the loss read logits that are computed anyway, without a gradient."""
    with graph.inserting_before(call):
        found = graph.call_method("detach", (head.logits,))
        call.update_arg(5, _viewed(graph, found, head, value(head.logits).shape[-1]))


def _cast(graph: fx.Graph, node: Any, dtype: torch.dtype) -> Any:
    """As autocast does; what it does to the weight the operator does slab by slab."""
    return node if value(node).dtype == dtype else graph.call_method("to", (node, dtype))


def _viewed(graph: fx.Graph, start: fx.Node, head: Head, last: int) -> fx.Node:
    """The views of ``head``, of ``start``, whose ``last`` dimension may be of another size."""
    result = start
    for view in head.views:
        if view.target in ("view", "reshape"):
            sizes = view.args[0] if isinstance(view.args[0], tuple | list) else view.args
            result = graph.call_method("reshape", (result, (*sizes[:-1], last)))
        elif isinstance(view.target, str):
            result = graph.call_method(view.target, (result, *view.args))
        else:
            result = graph.call_function(view.target, (result, *view.args))
    return result


def _replace(graph: fx.Graph, node: fx.Node, by: fx.Node) -> None:
    found = graph.call_method("to", (by, value(node).dtype))
    found.meta = dict(node.meta)
    node.replace_all_uses_with(found)
    graph.erase_node(node)


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase ``node`` and what it is a view of, as long as nobody reads it."""
    while not node.users and keeps_rows(node):
        source = source_of(node)
        graph.erase_node(node)
        assert isinstance(source, fx.Node)
        node = source


# ---- Logits that somebody else reads -----------------------------------------------------------------------------


def _return_nothing(graph: fx.Graph, head: Head) -> None:
    """Return NaN for logits that the caller is not going to read."""
    output, logits = graph.output_node(), head.logits
    if output not in logits.users:
        return
    dim = value(logits).dim()
    with graph.inserting_after(logits):
        column = graph.call_method("narrow", (head.linear.args[0], -1, 0, 1))
    with graph.inserting_after(column):
        options = {"dtype": value(logits).dtype, "requires_grad": False}
        nothing = graph.call_function(torch.full_like, (column, float("nan")), options)
    with graph.inserting_after(nothing):
        expanded = graph.call_method("expand", (nothing, *(-1,) * (dim - 1), value(logits).shape[-1]))
    output.replace_input_with(logits, expanded)
    _erase_unused(graph, logits)


def _return_late(graph: fx.Graph, head: Head) -> list[LateProduct]:
    """Return the logits without a gradient, and what it takes to give them one; [] where that is not at hand."""
    output = graph.output_node()
    inputs = graph.find_nodes(op="placeholder")
    hidden, weight, bias = (*head.linear.args, None)[:3]
    (results,) = output.args
    if weight not in inputs or (bias is not None and bias not in inputs) or not isinstance(results, tuple | list):
        return []
    added, logits = head.scaling.bias, head.logits
    if added is not None and (head.scaling.cap or value(added).requires_grad):
        return []
    positions = [position for position, result in enumerate(results) if result is logits]
    if len(positions) != 1 or not isinstance(hidden, fx.Node):
        return []
    with graph.inserting_after(logits):
        detached = graph.call_method("detach", (logits,))
    detached.meta["example_value"] = value(logits).detach()
    found = [detached if result is logits else result for result in results]
    output.args = (type(results)([*found, hidden]),)
    place = None if bias is None else inputs.index(bias)
    sizes = head.scaling.scale, head.scaling.cap
    return [LateProduct(positions[0], len(results), inputs.index(weight), place, *sizes)]
