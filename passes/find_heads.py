"""Find where a cross-entropy reads a linear layer by nothing but casts, views, slices of rows, and scaled or capped.

The graph is one of the model's own calls, as Dynamo traces them, with a fake value of each in
``meta["example_value"]``. What may not be computed some classes at a time, or not with the same gradient, is no head.
"""

import inspect
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from gact_fx.graphs.sizes import hint
from gact_fx.graphs.tensors import is_subclass, storage_key
from gact_fx.passes.scaled_logits import Scaling, is_scaling, source_of

# Logits of fewer elements are as soon stored.
MIN_NUMEL = 2**22
_CASTS = ("float", "double", "to", "type", "bfloat16", "half", "contiguous")
_VIEWS = ("view", "reshape", "flatten")
# Calls that read a tensor and write nothing, though their result may share its memory.
_HARMLESS = (
    *_CASTS, *_VIEWS, "detach", "size", "dim", "numel", "stride", "t", "transpose", "permute", "narrow", "unsqueeze",
    "squeeze", "expand", "chunk", "split", "unbind", "getitem", "getattr", "view_as",
)  # fmt: skip
_SIGNATURE = inspect.signature(F.cross_entropy)


@dataclass(frozen=True)
class View:
    """A call of ``target`` (a method by its name) with ``args`` behind the tensor that it views."""

    target: Any
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Head:
    """A ``linear`` layer, what makes ``logits`` of its result, and the ``views`` that make rows (N, V) of these."""

    linear: fx.Node
    scaling: Scaling
    logits: fx.Node
    views: tuple[View, ...]


def value(node: Any) -> Any:
    """The fake value that Dynamo traced."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def arguments_of(loss: fx.Node) -> dict[str, Any]:
    """The arguments of a call of ``F.cross_entropy``, by name."""
    bound = _SIGNATURE.bind(*loss.args, **loss.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def find_head(loss: fx.Node) -> Head | None:
    """What a call of ``F.cross_entropy`` reads the logits of; None where they stay whole."""
    arguments = arguments_of(loss)
    logits, target = value(arguments["input"]), value(arguments["target"])
    if not isinstance(logits, torch.Tensor) or not isinstance(target, torch.Tensor) or is_subclass(target):
        return None
    if arguments["size_average"] is not None or arguments["reduce"] is not None or _is_transformed(loss.graph):
        return None
    if logits.dim() != 2 or target.dim() != 1 or target.dtype != torch.int64 or hint(logits.numel()) < MIN_NUMEL:
        return None
    head = follow_back(arguments["input"])
    if head is None or loss in _without_gradient(loss.graph) or _is_written(head, arguments["input"]):
        return None
    return head


def find_logsumexps(graph: fx.Graph, head: Head, after: fx.Node) -> list[fx.Node]:
    """The calls behind ``after`` that take the logarithm of every row's sum of exponentials, with a gradient."""
    found, fixed = [], _without_gradient(graph)
    for node in graph.nodes:
        if node.target not in (torch.logsumexp, "logsumexp") or not node > after or node in fixed or not node.args:
            continue
        dims, read = [*node.args[1:], *node.kwargs.values()], value(node.args[0])
        is_of_rows = dims in ([-1], [1], [(-1,)], [(1,)]) and isinstance(read, torch.Tensor) and read.dim() == 2
        if is_of_rows and follow_back(node.args[0]) == head:
            found.append(node)
    return found


def follow_back(rows: Any) -> Head | None:
    """The linear layer that ``rows`` are views, casts and scalings of, with a gradient all the way."""
    views: list[View] = []
    scaling: Scaling | None = Scaling()
    logits: fx.Node | None = None
    fixed = _without_gradient(rows.graph) if isinstance(rows, fx.Node) else set()
    while isinstance(rows, fx.Node) and rows.target is not F.linear and scaling is not None:
        if not keeps_rows(rows) or rows in fixed:
            return None
        if is_scaling(rows):
            logits, scaling = logits or rows, scaling.behind(rows)
        elif not _is_cast(rows):
            views.insert(0, View(rows.target, rows.args[1:]))
            if logits is not None:
                # What others read would have another shape than the layer's result.
                return None
        rows = source_of(rows)
    if not isinstance(rows, fx.Node) or rows.kwargs or not _is_plain_linear(rows) or scaling is None:
        return None
    if scaling.bias is not None and len(rows.args) > 2 and rows.args[2] is not None:
        return None
    return Head(rows, scaling, logits or rows, tuple(views))


def keeps_rows(node: fx.Node) -> bool:
    """Whether ``node`` is a linear layer, or gives rows of what it reads, whole: as they are, cast or scaled."""
    return node.target is F.linear or _keeps_rows(node) or is_scaling(node)


def _is_plain_linear(linear: fx.Node) -> bool:
    logits, tensors = value(linear), [value(node) for node in linear.args if node is not None]
    if not all(isinstance(x, torch.Tensor) and not is_subclass(x) for x in (logits, *tensors)):
        return False
    # A layer's own weight; what is computed has a say in the gradient by more than the loss.
    own = all(isinstance(node, fx.Node) and node.op in ("placeholder", "get_attr") for node in linear.args[1:] if node)
    return own and bool(logits.requires_grad)


def _is_cast(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in _CASTS


def _keeps_rows(node: fx.Node) -> bool:
    before, after = value(node.args[0] if node.args else None), value(node)
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if _is_cast(node):
        # Loss and gradient are computed in float32 at least; another precision is the model's own choice.
        return before.device == after.device and after.dtype in (before.dtype, torch.float32)
    if not (before.dim() and after.dim() and before.shape[-1] == after.shape[-1]) or node.kwargs:
        return False
    if node.op == "call_method":
        return node.target in _VIEWS and after.dtype == before.dtype
    return node.target is operator.getitem and _is_slice_of_rows(node.args[1], before.dim())


def _is_slice_of_rows(index: Any, dim: int) -> bool:
    """Whether ``x[index]``, of so many dimensions, takes slices along others than the last."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts):
        return False
    reaches_last = Ellipsis in parts or len(parts) == dim
    return not reaches_last or parts[-1] in (Ellipsis, slice(None))


def _without_gradient(graph: fx.Graph) -> set[fx.Node]:
    """The calls that autograd does not follow: ``torch.no_grad()`` is a call of its own before and after them."""
    found, is_on = set(), True
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") == "_set_grad_enabled":
            is_on = bool(node.args[0])
        elif not is_on:
            found.add(node)
    return found


def _is_transformed(graph: fx.Graph) -> bool:
    """Whether something in ``graph`` runs under a transform of `torch.func`."""
    return any("increment_nesting" in str(getattr(node.target, "__name__", "")) for node in graph.nodes)


def _is_written(head: Head, rows: fx.Node) -> bool:
    """Whether anything behind the linear layer may write to what it reads or gives, or to a view of that.

    Dynamo's graph has writes in place, after which the same node stands for another value.
    """
    nodes, node = [rows], source_of(rows)
    while node is not None and nodes[-1] is not head.linear:
        nodes.append(node)
        node = source_of(node)
    given = [*head.linear.all_input_nodes, *([] if head.scaling.bias is None else [head.scaling.bias])]
    shared = {storage_key(value(node)) for node in (*nodes, *given)}

    def is_shared(node: fx.Node) -> bool:
        x = value(node)
        return isinstance(x, torch.Tensor) and not is_subclass(x) and storage_key(x) in shared

    behind = (n for n in head.linear.graph.nodes if n > head.linear and n.op not in ("placeholder", "output"))
    # What scales logits makes new memory.
    readers = (node for node in behind if node not in nodes or not is_scaling(node))
    return any(any(map(is_shared, node.all_input_nodes)) and _may_write(node, is_shared(node)) for node in readers)


def _may_write(node: fx.Node, gives_what_it_reads: bool) -> bool:
    """Whether a call may write to what it reads: whatever gives back that memory, or nothing, unless known not to."""
    name = node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))
    return name not in _HARMLESS and (gives_what_it_reads or value(node) is None)
