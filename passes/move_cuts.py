"""Save the sums, and products, that backward makes of a saved tensor and others, in the tensor's place.

The partitioner saves what products return, and backward adds it up again. Along a residual stream every sum would hold
the errors of all codes before it, and the last sum, which backward needs first, would have all of them decompressed;
what is multiplied by another tensor has its errors magnified. Where all that backward reads of a tensor goes by way of
one such result, forward can save this: it takes as many bytes.
"""

from collections import Counter
from collections.abc import Collection, Mapping

import torch
from torch import fx

from gact_fx.codec.layout import SOURCE_DTYPES
from gact_fx.graphs.aot import GraphPair, SavedValue
from gact_fx.graphs.edit import is_float, numel
from gact_fx.graphs.operator_table import REORDERS
from gact_fx.graphs.operators import packet_of
from gact_fx.graphs.tensors import storage_key
from gact_fx.passes.find_bends import bends, dependents_within, is_read_through
from gact_fx.passes.find_masks import derivable_nodes, is_known
from gact_fx.passes.forward_editor import ForwardEditor
from gact_fx.passes.load_blob import replace_reads
from gact_fx.passes.pipeline import Context


def move_cuts(pair: GraphPair, context: Context) -> Mapping[str, int]:
    """Edit both graphs in place; returns, by the slot's name, the bytes of tensors that a wider one stands for now."""
    derivable = derivable_nodes(pair)
    replaced: dict[str, int] = {}
    for value in _movable(pair):
        total = _last_joining(value.placeholder, derivable, context.config.min_elements)
        if total is not None:
            before = value.source.meta["val"].dtype
            if before.itemsize < total.meta["val"].dtype.itemsize:
                replaced[value.name] = numel(value.source) * before.itemsize
            pair.replace_saved(value, ForwardEditor(pair, {}).derive(total))
            replace_reads(total, value.placeholder, set())
    return replaced


def _movable(pair: GraphPair) -> list[SavedValue]:
    """The saved tensors that forward computes, does not return, and holds in memory of their own."""
    values = [v for v in pair.saved_values() if isinstance(v.source.meta.get("val"), torch.Tensor)]
    results = [node.meta.get("val") for node in pair.forward_outputs[: pair.num_user_outputs] if node is not None]
    memory = Counter(storage_key(x) for x in results if isinstance(x, torch.Tensor))
    memory.update(storage_key(value.source.meta["val"]) for value in values)
    is_alone = [value for value in values if memory[storage_key(value.source.meta["val"])] == 1]
    return [value for value in is_alone if value.source.op == "call_function" and is_float(value.source)]


def _is_stored_alike(node: fx.Node, start: fx.Node, least: int) -> bool:
    """Whether ``node`` can be stored in codes, and takes about as many bytes as ``start`` then.

    Under autocast the sums of a residual stream are in float32, and what is added to them is not. Their codes differ by
    the minimum of a group. Of fewer elements than ``least`` there are no codes, nor perhaps of what an operator reads
    that nobody knows.
    """
    dtype, before = node.meta["val"].dtype, start.meta["val"].dtype
    if dtype.itemsize <= before.itemsize:
        return dtype in SOURCE_DTYPES
    readers = {user for view in _views_of(node) for user in view.users}
    return dtype is torch.float32 and numel(node) >= least and all(map(is_known, readers))


def _views_of(node: fx.Node) -> list[fx.Node]:
    """``node``, and what is only another shape or order of it."""
    found = [node]
    for each in found:
        found += [user for user in each.users if packet_of(user) in REORDERS]
    return found


def _last_joining(start: fx.Node, derivable: Collection[fx.Node], least: int) -> fx.Node | None:
    """The last node that joins something as large to ``start``, by affine operators, and that all reads go through."""
    chain = dependents_within(start, derivable)
    for node in sorted(chain - {start}, reverse=True):
        joins = any(is_float(i) and numel(i) == numel(start) and i not in chain for i in node.all_input_nodes)
        fits = joins and bool(node.users) and is_float(node) and numel(node) == numel(start)
        if fits and _is_stored_alike(node, start, least) and is_read_through([node], start, chain, derivable):
            before = dependents_within(start, derivable, {node.name})
            return None if bends({*before, node}, [start]) else node
    return None
