"""Have backward read masks from blobs, right before their first use.

Masks come before values (`read_values`): the comparisons that they replace then no longer count as uses of the values.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from gact_fx.codec.code import MASK_CODE
from gact_fx.graphs.aot import GraphPair, SavedValue
from gact_fx.graphs.edit import add_call, restored
from gact_fx.graphs.sizes import SizeBuilder
from gact_fx.passes.load_blob import load_blob, replace_reads
from gact_fx.passes.merge_masks import find_stopped
from gact_fx.passes.pipeline import Context
from gact_fx.passes.reads import MaskRead, MergedRead

aten = torch.ops.aten
# Of a backward node that reads a mask: the name that the mask had.
MASK_OF = "gact_fx mask of"


def read_masks(pair: GraphPair, context: Context) -> dict[str, fx.Node]:
    """Edit ``pair.backward`` in place; returns the nodes that stand for masks, by the masks' names."""
    editor = _Editor(pair)
    for read in context.reads:
        if isinstance(read, MaskRead):
            editor.load_masks(read)
        elif isinstance(read, MergedRead):
            editor.load_merged(read)
    return editor.exact


class _Editor:
    def __init__(self, pair: GraphPair) -> None:
        self.exact: dict[str, fx.Node] = {}
        self._graph = pair.backward.graph
        self._sizes = SizeBuilder(self._graph)
        self._backward = {node.name: node for node in self._graph.nodes}

    def load_merged(self, read: MergedRead) -> None:
        """The mask that codes tell, from values of its own: it may be needed long before they are."""
        if not read.mask.users:
            return
        like = read.value.source.meta["val"]
        with self._graph.inserting_before(min(read.mask.users)):
            _, values = load_blob(self._sizes, read.value, like.shape, like.dtype, read.code, read.order)
            self._give(read.mask, find_stopped(values, partial(add_call, self._graph)))

    def load_masks(self, read: MaskRead) -> None:
        masks = [self._backward[name] for name in read.masks]
        if not masks:
            return
        dims = [mask.meta["val"].dim() for mask in masks]
        orders = [read.order if len(read.order) == dim else range(dim) for dim in dims]
        readers = [user for mask in masks for user in mask.users]
        if read.before is not None:
            readers += read.before.users
        with self._graph.inserting_before(min(readers)):
            if len(masks) == 1:
                shape = masks[0].meta["val"].shape
                loaded = [load_blob(self._sizes, read.value, shape, torch.bool, MASK_CODE, orders[0])[1]]
            else:
                loaded = self._load_several(read.value, [mask.meta["val"].shape for mask in masks], orders)
        for mask, exact in zip(masks, loaded, strict=True):
            self._give(mask, exact)

    def _load_several(
        self, value: SavedValue, shapes: Sequence[Sequence[Any]], orders: Sequence[Sequence[int]]
    ) -> list[fx.Node]:
        stored = [[shape[d] for d in order] for shape, order in zip(shapes, orders, strict=True)]
        ends = list(accumulate(math.prod(shape) for shape in stored))
        flat, _ = load_blob(self._sizes, value, [ends[-1]], torch.bool, MASK_CODE, [0])
        loaded = []
        for start, end, shape, order in zip([0, *ends], ends, stored, orders, strict=False):
            bounds = self._sizes.build([start, end])
            part = add_call(self._graph, aten.slice.Tensor, (flat, 0, *bounds), f"{value.name}_part")
            part = add_call(self._graph, aten.reshape.default, (part, self._sizes.build(shape)), f"{value.name}_mask")
            loaded.append(restored(self._graph, part, order))
        return loaded

    def _give(self, mask: fx.Node, exact: fx.Node) -> None:
        exact.meta[MASK_OF] = mask.name
        replace_reads(mask, exact, {exact})
        self.exact[mask.name] = exact
