"""Insert decompress into backward, right before the first use of what a blob has: values, or masks.

What is edited by `insert_compression` in forward is read here; nothing but backward's graph changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from gact_fx.codec import operators  # noqa: F401  (register torch.ops.gact_fx)
from gact_fx.graphs.aot import GraphPair, SavedValue
from gact_fx.graphs.edit import add_call, restored
from gact_fx.graphs.sizes import SizeBuilder
from gact_fx.passes.merge_masks import fill_stopped, find_stopped
from gact_fx.passes.standardize import resolve, unstandardize
from gact_fx.records import Eligibility

aten = torch.ops.aten
decompress = torch.ops.gact_fx.decompress.default
convert = torch.ops.prims.convert_element_type.default
# Bits, group size and seed; of these only bits matters to masks and integers.
MASK_CODEC = (1, 256, 0)
# Of a backward node that reads a mask: the name that the mask had.
MASK_OF = "gact_fx mask of"


class Decompressions:
    """Edits the backward graph of ``pair``; masks come before the values that are made from them."""

    def __init__(self, pair: GraphPair) -> None:
        self._pair = pair
        self._sizes = SizeBuilder(pair.backward.graph)
        self._backward = {node.name: node for node in pair.backward.graph.nodes}
        self._exact_masks: dict[str, fx.Node] = {}

    def load_values(
        self,
        value: SavedValue,
        read: fx.Node,
        original: torch.Tensor,
        how: Eligibility,
        codec: tuple[Any, ...],
        aliases: list[tuple[SavedValue, torch.Tensor]],
        is_merged: bool = False,
    ) -> None:
        """Decompress in place of ``read``: the tensor's placeholder, or the node that was stored in its place."""
        slots = [read, *(alias.placeholder for alias, _ in aliases)]
        users = [user for slot in slots for user in slot.users if user.target is not decompress]
        if not users:
            return
        graph = self._pair.backward.graph
        start = original.storage_offset()
        with graph.inserting_before(min(users)):
            shape = [original.shape[d] for d in how.order]
            dense, values = self._load(value, shape, original.dtype, codec, how.order)
            if is_merged:
                values = fill_stopped(values, how, partial(add_call, graph))
            if how.standardization is not None:
                by = resolve(how.standardization, lambda name: self._exact_masks.get(name) or self._backward[name])
                values = unstandardize(values, by, partial(add_call, graph))
            views = [
                add_call(
                    graph,
                    aten.as_strided.default,
                    (dense, list(view.shape), list(view.stride()), view.storage_offset() - start),
                    f"{alias.name}_view",
                )
                for alias, view in aliases
            ]
        replace_reads(read, values, {dense, values})
        for (alias, _), node in zip(aliases, views, strict=True):
            replace_reads(alias.placeholder, node, set())

    def load_merged(
        self, mask: fx.Node, value: SavedValue, original: torch.Tensor, how: Eligibility, codec: tuple[Any, ...]
    ) -> None:
        """The mask that the codes tell, from values of its own: it may be needed long before they are."""
        if not mask.users:
            return
        graph = self._pair.backward.graph
        with graph.inserting_before(min(mask.users)):
            _, values = self._load(value, [original.shape[d] for d in how.order], original.dtype, codec, how.order)
            self._give_mask(mask, find_stopped(values, partial(add_call, graph)))

    def _give_mask(self, mask: fx.Node, exact: fx.Node) -> None:
        exact.meta[MASK_OF] = mask.name
        replace_reads(mask, exact, {exact})
        self._exact_masks[mask.name] = exact

    def load_masks(self, value: SavedValue, how: Eligibility) -> None:
        graph = self._pair.backward.graph
        masks = [self._backward[name] for name in how.masks]
        if not masks:
            return
        orders = [how.order if len(how.order) == m.meta["val"].dim() else range(m.meta["val"].dim()) for m in masks]
        shapes = [[m.meta["val"].shape[d] for d in order] for m, order in zip(masks, orders, strict=True)]
        readers = [user for mask in masks for user in mask.users]
        if how.standardization is not None:
            # What the values are made from by the mask comes after it.
            readers += (self._backward[how.instead] if how.instead else value.placeholder).users
        with graph.inserting_before(min(readers)):
            if len(masks) == 1:
                loaded = [self._load(value, shapes[0], torch.bool, MASK_CODEC, orders[0])[1]]
            else:
                loaded = self._load_several(value, shapes, orders)
        for mask, exact in zip(masks, loaded, strict=True):
            self._give_mask(mask, exact)

    def _load_several(
        self, value: SavedValue, shapes: list[list[Any]], orders: Sequence[Sequence[int]]
    ) -> list[fx.Node]:
        graph = self._pair.backward.graph
        ends = list(accumulate(math.prod(shape) for shape in shapes))
        flat, _ = self._load(value, [ends[-1]], torch.bool, MASK_CODEC, [0])
        loaded = []
        for start, end, shape, order in zip([0, *ends], ends, shapes, orders, strict=False):
            part = add_call(graph, aten.slice.Tensor, (flat, 0, *self._sizes.build([start, end])), f"{value.name}_part")
            part = add_call(graph, aten.reshape.default, (part, self._sizes.build(shape)), f"{value.name}_mask")
            loaded.append(restored(graph, part, order))
        return loaded

    def _load(
        self, value: SavedValue, shape: list[Any], dtype: torch.dtype, codec: tuple[Any, ...], order: Sequence[int]
    ) -> tuple[fx.Node, fx.Node]:
        """The decompressed tensor in memory order, and in the order of its dimensions.

        ``codec`` is what the blob was written with: bits, group size, seed and, for values, rounding.
        """
        graph = self._pair.backward.graph
        stored = torch.uint8 if dtype is torch.bool else dtype
        arguments = (value.placeholder, self._sizes.build(shape), stored, *codec)
        dense = add_call(graph, decompress, arguments, f"{value.name}_{'mask' if dtype is torch.bool else 'values'}")
        if dtype is torch.bool:
            number = add_call(graph, convert, (dense, torch.float32), f"{value.name}_number")
            dense = add_call(graph, aten.gt.Scalar, (number, 0.5), f"{value.name}_truth")
        return dense, restored(graph, dense, order)


def replace_reads(old: fx.Node, new: fx.Node, readers: set[fx.Node]) -> None:
    """Let those who read ``old`` read ``new``, but for ``readers`` and what decompresses blobs."""
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in readers and user.target is not decompress)
