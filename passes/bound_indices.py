"""Bound the indices that an operator returns, so that they can be packed into a few bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# Operators that return positions along one dimension: their output that does (None: the only one), and which argument
# names the dimension, with its default.
_ALONG: dict[Any, tuple[int | None, int, int | None]] = {
    aten.argmax.default: (None, 1, None),
    aten.argmin.default: (None, 1, None),
    aten.argsort.default: (None, 1, -1),
    aten.max.dim: (1, 1, None),
    aten.min.dim: (1, 1, None),
    aten.median.dim: (1, 1, None),
    aten.mode.default: (1, 1, -1),
    aten.sort.default: (1, 1, -1),
    aten.topk.default: (1, 2, -1),
    aten.kthvalue.default: (1, 2, -1),
    aten.cummax.default: (1, 1, None),
    aten.cummin.default: (1, 1, None),
}
# Operators that return positions in a plane of their input: how many of its last dimensions make one.
_IN_PLANE: dict[Any, int] = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
    aten.fractional_max_pool2d.default: 2,
}


def index_limit(node: fx.Node) -> int | None:
    """A number that every element of ``node`` is below, all being at least 0; None where none is known.

    Sizes that vary from batch to batch bound nothing.
    """
    output: int | None = None
    if node.target is getitem:
        node, output = node.args[0], node.args[1]  # type: ignore[assignment]
    if not isinstance(node, fx.Node) or node.op != "call_function" or not node.args:
        return None
    source = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    if not isinstance(source, torch.Tensor):
        return None
    # By name: Inductor registers its operators when it is first used.
    if str(node.target) == "prims._low_memory_max_pool_with_offsets.default" and output == 1:
        return math.prod(node.args[1])  # type: ignore[arg-type]
    if node.target in _IN_PLANE and output == 1:
        return _product(source.shape[-_IN_PLANE[node.target] :])
    if node.target in _ALONG and output == _ALONG[node.target][0]:
        _, position, default = _ALONG[node.target]
        dimension: Any = node.args[position] if len(node.args) > position else node.kwargs.get("dim", default)
        return _product(source.shape if dimension is None else [source.shape[dimension]])
    return None


def _product(sizes: Sequence[int]) -> int | None:
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None
