"""Compute a linear layer and the cross-entropy behind it in pieces, so that no logits are there whole.

Before AOTAutograd differentiates a graph, the calls in it are those of the model's code. Where a cross-entropy reads a
linear layer by nothing but casts, views and slices of rows, as the heads of language models do, it becomes
`gact_fx.graphs.linear_cross_entropy` of the rows that the layer reads. So does ``logsumexp`` of the same logits, which
a z-loss squares.

Logits that the model returns beside its loss are computed, once, and returned as they are: without a gradient, since
autograd would make one as large as they are, of zeros, where nobody uses it. `gact_fx.graphs.late_product` gives them
theirs back. Whoever reads the loss alone (``Config.loss_only``) gets NaN in their place, which take no memory.
"""

import inspect
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from gact_fx.graphs.late_product import LateProduct
from gact_fx.graphs.sizes import hint

# Logits of fewer elements are as soon stored.
MIN_NUMEL = 2**22
_CASTS = ("float", "double", "to", "type", "bfloat16", "half", "contiguous")
_VIEWS = ("view", "reshape", "flatten")
_OPERATOR = torch.ops.gact_fx.linear_cross_entropy.default
_SIGNATURE = inspect.signature(F.cross_entropy)


@dataclass(frozen=True)
class _Head:
    """A ``linear`` layer, and the ``views`` by which its logits become rows (N, V) that a loss reads."""

    linear: fx.Node
    views: tuple[fx.Node, ...]


def split_cross_entropy(module: fx.GraphModule, *, loss_only: bool = False) -> list[LateProduct]:
    """Edit ``module``, a graph of the model's own calls, in place; returns the outputs that want a gradient."""
    graph = module.graph
    split: list[tuple[_Head, fx.Node]] = []
    for loss in graph.find_nodes(op="call_function", target=F.cross_entropy):
        head = _find_head(loss)
        if head is not None:
            split.append((head, _split(graph, loss, head)))
    late: list[LateProduct] = []
    # What nobody else reads is gone by now.
    for linear in dict.fromkeys(head.linear for head, _ in split if head.linear.users):
        if loss_only:
            _return_nothing(graph, linear)
        elif all(user.op == "output" for user in linear.users):
            late += _return_late(graph, linear)
    for head, call in split:
        if head.linear.users:
            _share(graph, head, call)
    if split:
        graph.lint()
        module.recompile()
    return late


# ---- Finding -----------------------------------------------------------------------------------------------------


def _value(node: Any) -> Any:
    """The fake value that Dynamo traced."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _arguments(loss: fx.Node) -> dict[str, Any]:
    bound = _SIGNATURE.bind(*loss.args, **loss.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _find_head(loss: fx.Node) -> _Head | None:
    """What a call of ``F.cross_entropy`` reads the logits of; None where they stay whole."""
    arguments = _arguments(loss)
    logits, target = _value(arguments["input"]), _value(arguments["target"])
    if not isinstance(logits, torch.Tensor) or not isinstance(target, torch.Tensor):
        return None
    if arguments["size_average"] is not None or arguments["reduce"] is not None:
        return None
    if logits.dim() != 2 or target.dim() != 1 or target.is_floating_point() or hint(logits.numel()) < MIN_NUMEL:
        return None
    return _follow_back(arguments["input"])


def _follow_back(rows: Any) -> _Head | None:
    """The linear layer that ``rows`` are views and casts of."""
    views: list[fx.Node] = []
    while isinstance(rows, fx.Node) and not (rows.op == "call_function" and rows.target is F.linear):
        if not _keeps_rows(rows):
            return None
        if not _is_cast(rows):
            views.insert(0, rows)
        rows = rows.args[0]
    if not isinstance(rows, fx.Node) or rows.kwargs:
        return None
    value = _value(rows)
    return _Head(rows, tuple(views)) if isinstance(value, torch.Tensor) and value.requires_grad else None


def _is_cast(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in _CASTS


def _keeps_rows(node: fx.Node) -> bool:
    """Whether the rows of the result are rows of the first argument, whole."""
    before, after = _value(node.args[0] if node.args else None), _value(node)
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or not after.is_floating_point():
        return False
    if _is_cast(node):
        return before.device == after.device
    if not (before.dim() and after.dim() and before.shape[-1] == after.shape[-1]) or node.kwargs:
        return False
    if node.op == "call_method":
        return node.target in _VIEWS and all(not isinstance(size, torch.dtype) for size in node.args[1:])
    return node.target is operator.getitem and _is_slice_of_rows(node.args[1], before.dim())


def _is_slice_of_rows(index: Any, dim: int) -> bool:
    """Whether ``x[index]``, of so many dimensions, takes slices along others than the last."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts):
        return False
    reaches_last = Ellipsis in parts or len(parts) == dim
    return not reaches_last or parts[-1] in (Ellipsis, slice(None))


# ---- Splitting ---------------------------------------------------------------------------------------------------


def _split(graph: fx.Graph, loss: fx.Node, head: _Head) -> fx.Node:
    """Compute ``loss``, and the logarithms of the logits' sums of exponentials, from what the linear layer reads."""
    arguments = _arguments(loss)
    target, weights = arguments["target"], arguments["weight"]
    dtype = _value(head.linear).dtype
    with graph.inserting_before(loss):
        hidden, weight, bias = (_cast(graph, node, dtype) for node in (*head.linear.args, None)[:3])
        rows = _viewed(graph, hidden, head.views, _value(head.linear.args[0]).shape[-1])
        options = (arguments["ignore_index"], arguments["label_smoothing"])
        both = graph.call_function(_OPERATOR, (rows, weight, bias, target, weights, None, *options))
        of_rows, lse = (graph.call_function(operator.getitem, (both, index)) for index in range(2))
        result = of_rows
        if arguments["reduction"] != "none":
            result = graph.call_method("sum", (of_rows,))
        if arguments["reduction"] == "mean":
            counts = graph.call_function(torch.ne, (target, options[0]))
            if weights is not None:
                index = graph.call_function(torch.where, (counts, target, 0))
                own = graph.call_function(operator.getitem, (weights, index))
                counts = graph.call_function(operator.mul, (own, counts))
            result = graph.call_function(operator.truediv, (result, graph.call_method("sum", (counts,))))
        _replace(graph, loss, result)
    for other in [node for node in graph.nodes if _is_logsumexp(node) and node > both]:
        if _follow_back(other.args[0]) == head:
            with graph.inserting_before(other):
                _replace(graph, other, lse)
    _erase_unused(graph, arguments["input"])
    return both


def _share(graph: fx.Graph, head: _Head, call: fx.Node) -> None:
    """Have the loss read logits that are computed anyway, without a gradient."""
    with graph.inserting_before(call):
        found = graph.call_method("detach", (head.linear,))
        call.update_arg(5, _viewed(graph, found, head.views, _value(head.linear).shape[-1]))


def _cast(graph: fx.Graph, node: Any, dtype: torch.dtype) -> Any:
    """As autocast does."""
    return node if node is None or _value(node).dtype == dtype else graph.call_method("to", (node, dtype))


def _viewed(graph: fx.Graph, start: fx.Node, views: Sequence[fx.Node], last: int) -> fx.Node:
    """The same ``views`` of ``start``, whose ``last`` dimension is of another size."""
    found = start
    for view in views:
        if view.target in ("view", "reshape"):
            sizes = view.args[1] if isinstance(view.args[1], tuple | list) else view.args[1:]
            found = graph.call_method("reshape", (found, (*sizes[:-1], last)))
        elif view.op == "call_method":
            found = graph.call_method(str(view.target), (found, *view.args[1:]))
        else:
            found = graph.call_function(view.target, (found, *view.args[1:]))  # type: ignore[arg-type]
    return found


def _is_logsumexp(node: fx.Node) -> bool:
    """Whether ``node`` is the logarithm of every row's sum of exponentials."""
    if node.target not in (torch.logsumexp, "logsumexp") or len(_value(node.args[0]).shape) != 2:
        return False
    dims = [*node.args[1:], *node.kwargs.values()]
    return dims in ([-1], [1], [(-1,)], [(1,)])


def _replace(graph: fx.Graph, node: fx.Node, by: fx.Node) -> None:
    found = graph.call_method("to", (by, _value(node).dtype))
    found.meta = dict(node.meta)
    node.replace_all_uses_with(found)
    graph.erase_node(node)


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase ``node`` and what it is a view of, as long as nobody reads it."""
    while not node.users and (node.target is F.linear or _keeps_rows(node)):
        source = node.args[0]
        graph.erase_node(node)
        assert isinstance(source, fx.Node)
        node = source


# ---- Logits that somebody else reads -----------------------------------------------------------------------------


def _return_nothing(graph: fx.Graph, linear: fx.Node) -> None:
    """Return NaN for logits that the caller is not going to read."""
    output = graph.output_node()
    if output not in linear.users:
        return
    dim = _value(linear).dim()
    with graph.inserting_after(linear):
        column = graph.call_method("narrow", (linear.args[0], -1, 0, 1))
    with graph.inserting_after(column):
        options = {"dtype": _value(linear).dtype, "requires_grad": False}
        nothing = graph.call_function(torch.full_like, (column, float("nan")), options)
    with graph.inserting_after(nothing):
        expanded = graph.call_method("expand", (nothing, *(-1,) * (dim - 1), _value(linear).shape[-1]))
    output.replace_input_with(linear, expanded)
    _erase_unused(graph, linear)


def _return_late(graph: fx.Graph, linear: fx.Node) -> list[LateProduct]:
    """Return the logits without a gradient, and what it takes to give them one; [] where that is not at hand."""
    output = graph.output_node()
    inputs = graph.find_nodes(op="placeholder")
    hidden, weight, bias = (*linear.args, None)[:3]
    (results,) = output.args
    if weight not in inputs or (bias is not None and bias not in inputs) or not isinstance(results, tuple | list):
        return []
    positions = [position for position, result in enumerate(results) if result is linear]
    if len(positions) != 1 or not isinstance(hidden, fx.Node):
        return []
    with graph.inserting_after(linear):
        detached = graph.call_method("detach", (linear,))
    detached.meta["example_value"] = _value(linear).detach()
    found = [detached if result is linear else result for result in results]
    output.args = (type(results)([*found, hidden]),)
    place = None if bias is None else inputs.index(bias)
    return [LateProduct(positions[0], len(results), inputs.index(weight), place)]
