"""Bound the indices that operators return or take, so that they can be packed into a few bits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from gact_fx.graphs.aot import SavedValue
from gact_fx.graphs.operator_table import POSITIONS, POSITIONS_IN_PLANE, REORDERS, TAKES_POSITIONS, TAKES_WRAPPING
from gact_fx.graphs.operators import packet_of
from gact_fx.records import SavedTensor

aten = torch.ops.aten
_PACKABLE = (torch.int8, torch.int16, torch.int32, torch.int64)

# Of all elements of the input.
_ALL_ELEMENTS = REORDERS | {aten.expand, aten.cat}


@dataclass(frozen=True)
class IndexRange:
    """Elements lie in [0, ``limit``), or with ``wraps`` in [-``limit``, ``limit``), where i and i - limit are one."""

    limit: int
    wraps: bool = False


def index_range(node: fx.Node) -> IndexRange | None:
    """The range of the elements of ``node``, by what made them or else by what they index; None if not known.

    Sizes that vary from batch to batch bound nothing.
    """
    limit = index_limit(node)
    return IndexRange(limit) if limit is not None else _range_by_use(node)


def _range_by_use(node: fx.Node) -> IndexRange | None:
    """From operators that every element of ``node`` goes through, as an index."""
    value = node.meta["val"]
    rows: dict[int, IndexRange] = {}
    found: list[IndexRange] = []
    only_indexes = True
    for user in node.users:
        if user.op == "output":
            continue
        taken = _taken(user, node)
        if taken is None and packet_of(user) in _ALL_ELEMENTS:
            taken = _range_by_use(user)
        elif taken is None and user.target is aten.select.int and user.args[1] == 0:
            row = _range_by_use(user)
            if row is not None:
                rows[user.args[2] % value.shape[0]] = row
                continue
        if taken is None:
            only_indexes = False
        else:
            found.append(taken)
    if not found and value.dim() and len(rows) == value.shape[0]:
        found = [IndexRange(max(r.limit for r in rows.values()), any(r.wraps for r in rows.values()))]
        if found[0].wraps and len({r.limit for r in rows.values()}) > 1:
            return None
    limits = {r.limit for r in found}
    wraps = all(r.wraps for r in found)
    if not found or (wraps and (len(limits) > 1 or not only_indexes)):
        return None
    return IndexRange(min(r.limit for r in found if wraps or not r.wraps), wraps)


def _taken(user: fx.Node, index: fx.Node) -> IndexRange | None:
    """What ``user`` requires of ``index``, None where it does not index by it."""
    source = user.args[0] if user.args else None
    if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), torch.Tensor):
        return None
    shape = source.meta["val"].shape
    size: Any
    if user.target in TAKES_POSITIONS and user.args[TAKES_POSITIONS[user.target][1]] is index:
        dimension = TAKES_POSITIONS[user.target][0]
        size = shape[0 if dimension is None else user.args[dimension]]
        return IndexRange(size) if isinstance(size, int) else None
    if user.target in TAKES_WRAPPING:
        indices: Any = user.args[1]
        # A mask takes the place of as many dimensions as it has, and those after it count from there.
        if any(each is not None and each.meta["val"].dtype in (torch.bool, torch.uint8) for each in indices):
            return None
        sizes = [shape[i] for i, each in enumerate(indices) if each is index]
        if not sizes or not all(isinstance(size, int) and size == sizes[0] for size in sizes):
            return None
        return IndexRange(sizes[0], wraps=True)
    return None


def index_limit(node: fx.Node) -> int | None:
    """A number that every element which the operator ``node`` returns is below, all being at least 0, or None."""
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
    if node.target in POSITIONS_IN_PLANE and output == 1:
        return _product(source.shape[-POSITIONS_IN_PLANE[node.target] :])
    if node.target in POSITIONS and output == POSITIONS[node.target][0]:
        _, position, default = POSITIONS[node.target]
        dimension: Any = node.args[position] if len(node.args) > position else node.kwargs.get("dim", default)
        return _product(source.shape if dimension is None else [source.shape[dimension]])
    return None


def _product(sizes: Sequence[int]) -> int | None:
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def packable_range(tensor: SavedTensor, value: SavedValue, min_elements: int) -> IndexRange | None:
    """The range of an integer tensor's elements, None where it is not known or packing would save nothing."""
    is_whole = tensor.owner in ("nobody", "output") and tensor.nbytes == tensor.storage_nbytes and not tensor.dynamic
    if tensor.dtype not in _PACKABLE or not is_whole or tensor.numel < max(min_elements, 1):
        return None
    found = index_range(value.source)
    if found is None or bits_of(found) > min(16, tensor.dtype.itemsize * 8 - 1):
        return None
    # Read as anything but an index, -1 is not the last one.
    in_backward = index_range(value.placeholder) if found.wraps else found
    return found if in_backward is not None and in_backward.limit == found.limit else None


def bits_of(found: IndexRange) -> int:
    """Bits that hold every value exactly."""
    return max(found.limit - 1, 1).bit_length()
