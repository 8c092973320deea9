"""Insert compress into forward, and by `insert_decompression` decompress into backward.

Every saved tensor's blob takes the tensor's place among forward's outputs and backward's inputs, so counts and order
never change. Compression goes right after the source's last use in forward, decompression right before its first use in
backward, so that the values live as briefly as they can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from gact_fx.codec import operators  # noqa: F401  (register torch.ops.gact_fx)
from gact_fx.graphs.aot import GraphPair, SavedValue
from gact_fx.graphs.edit import add_call, latest
from gact_fx.passes.insert_decompression import MASK_CODEC, Decompressions, replace_reads
from gact_fx.passes.merge_masks import mark_stopped, without_merged
from gact_fx.passes.standardize import resolve, standardize
from gact_fx.plan import GraphPlan, TensorPlan
from gact_fx.records import ALIAS, DROP, MASK, PACK, QUANTIZE, Eligibility, GraphAnalysis

aten = torch.ops.aten
compress = torch.ops.gact_fx.compress.default
convert = torch.ops.prims.convert_element_type.default


def insert_compression(pair: GraphPair, analysis: GraphAnalysis, plan: GraphPlan) -> GraphPair:
    """Rewrite ``pair`` in place; tensors that ``plan`` keeps (``bits`` None) stay as they are.

    Raises:
        KeyError: ``plan`` has no entry for a tensor that is to be quantized.
    """
    editor = _Editor(pair)
    values = {value.name: value for value in pair.saved_values()}
    entries = plan.entries()
    aliases: dict[str, list[SavedValue]] = {}
    for how in analysis.eligibility:
        if how.encoding == ALIAS:
            aliases.setdefault(how.alias_of, []).append(values[how.name])
    for tensor, how in zip(analysis.saved, analysis.eligibility, strict=True):
        value = values[how.name]
        if how.encoding == DROP:
            editor.save_nothing(value)
        elif how.encoding == MASK:
            editor.save_masks(value, how)
        elif how.encoding == PACK:
            editor.save_integers(value, how)
        elif how.encoding == QUANTIZE:
            entry = entries[tensor.key]
            if entry.bits is not None:
                editor.save_codes(value, how, entry, aliases.get(how.name, []))
            elif how.instead:
                editor.save_instead(value, how)
    editor.finish()
    return pair


class _Editor:
    """Edits forward at once and collects backward's edits, since mask chains are copied from backward as it was."""

    def __init__(self, pair: GraphPair) -> None:
        self._pair = pair
        self._loads = Decompressions(pair)
        self._backward = {node.name: node for node in pair.backward.graph.nodes}
        self._forward = {node.name: node for node in pair.forward.graph.nodes}
        self._sources = {value.placeholder: value.source for value in pair.saved_values()}
        self._mask_edits: list[Callable[[], None]] = []
        self._value_edits: list[Callable[[], None]] = []

    def save_codes(self, value: SavedValue, how: Eligibility, plan: TensorPlan, aliases: list[SavedValue]) -> None:
        merged = self._backward[how.merges] if plan.merged else None
        if merged is not None:
            how = without_merged(how)
        mask = self._packed_masks(how)
        read = self._backward[how.instead] if how.instead else value.placeholder
        original = self._derive(read).meta["val"]
        source = self._derive(read)
        is_computed = how.standardization is not None or merged is not None
        if how.standardization is not None:
            by = resolve(how.standardization, lambda name: self._derive(self._backward[name]))
            source = standardize(source, by, self._add_forward)
        if merged is not None:
            source = mark_stopped(source, self._derive(merged), self._add_forward)
        codec = (plan.bits, plan.group_size, plan.seed)
        dense = self._in_order(source, how.order)
        dense = self._laid_out(dense, source) if is_computed else dense
        blob = self._add_forward(compress, (dense, *codec, mask, plan.rounding), f"{value.name}_blob")
        views = [(alias, alias.source.meta["val"]) for alias in aliases]
        for saved in (value, *aliases):
            self._pair.replace_saved(saved, blob)
        load, whole = self._loads, (*codec, plan.rounding)
        self._mask_edits.append(lambda: load.load_masks(value, how))
        if merged is not None:
            self._mask_edits.append(lambda: load.load_merged(merged, value, original, how, whole))
        is_merged = merged is not None
        self._value_edits.append(lambda: load.load_values(value, read, original, how, whole, views, is_merged))

    def save_instead(self, value: SavedValue, how: Eligibility) -> None:
        """The node that stands for the tensor, as it is: what backward would make it from may not be saved any more."""
        read = self._backward[how.instead]
        self._pair.replace_saved(value, self._derive(read))
        self._value_edits.append(lambda: replace_reads(read, value.placeholder, set()))

    def save_integers(self, value: SavedValue, how: Eligibility) -> None:
        slot, original = value.placeholder, value.source.meta["val"]
        codec = (how.min_bits, *MASK_CODEC[1:])
        integers = self._in_order(value.source, how.order)
        if how.modulus is not None:
            integers = self._add_forward(aten.remainder.Scalar, (integers, how.modulus), f"{value.name}_positive")
        blob = self._add_forward(compress, (integers, *codec), f"{value.name}_blob")
        self._pair.replace_saved(value, blob)
        self._value_edits.append(lambda: self._loads.load_values(value, slot, original, how, codec, []))

    def save_masks(self, value: SavedValue, how: Eligibility) -> None:
        mask = self._packed_masks(how) if how.masks else self._as_bytes(value.source, how.order)
        blob = self._add_forward(compress, (mask, *MASK_CODEC), f"{value.name}_blob")
        self._pair.replace_saved(value, blob)
        self._mask_edits.append(lambda: self._loads.load_masks(value, how))
        if not how.masks:
            slot, original = value.placeholder, value.source.meta["val"]
            self._value_edits.append(lambda: self._loads.load_values(value, slot, original, how, MASK_CODEC, []))

    def save_nothing(self, value: SavedValue) -> None:
        """An empty tensor in the slot, since positions must not change."""
        if value.source.op == "placeholder":
            return
        graph, val = self._pair.forward.graph, value.source.meta["val"]
        with graph.inserting_before(graph.output_node()):
            empty = graph.call_function(aten.full.default, ([0], 0), {"dtype": val.dtype, "device": val.device})
        with val.fake_mode:
            empty.meta["val"] = aten.full.default([0], 0, dtype=val.dtype, device=val.device)
        self._pair.replace_saved(value, empty)

    def finish(self) -> None:
        # Masks first: the comparisons they replace then no longer count as uses of the values.
        for edits in (self._mask_edits, self._value_edits):
            for edit in edits:
                edit()
            self._pair.backward.graph.eliminate_dead_code()
        self._pair.forward.graph.eliminate_dead_code()
        self._pair.forward.recompile()
        self._pair.backward.recompile()

    # Forward

    def _packed_masks(self, how: Eligibility) -> fx.Node | None:
        """The tensor's masks as one boolean node of forward, or None."""
        masks = [self._as_bytes(self._derive(self._backward[name]), how.order) for name in how.masks]
        if len(masks) <= 1:
            return masks[0] if masks else None
        flat = [self._add_forward(aten.reshape.default, (mask, [-1]), f"{mask.name}_flat") for mask in masks]
        return self._add_forward(aten.cat.default, (flat,), f"{how.name}_masks")

    def _derive(self, node: fx.Node) -> fx.Node:
        """The forward node with the value of backward's ``node``, copied over with what it needs where missing."""
        if node in self._sources:
            return self._sources[node]
        inputs = {i: self._derive(i) for i in node.all_input_nodes}
        twin: fx.Node | None = self._forward.get(node.name)
        # The partitioner leaves a recomputed node its name in both graphs.
        if twin is not None and twin.target is node.target:
            arguments = fx.map_arg((node.args, node.kwargs), lambda i: inputs[i])
            if arguments == (twin.args, twin.kwargs):
                return twin
        graph = self._pair.forward.graph
        with graph.inserting_after(latest(self._pair.forward, list(inputs.values()))):
            copy = graph.node_copy(node, lambda i: inputs[i])
        self._forward[node.name] = copy
        return copy

    def _in_order(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        """``node`` with its dimensions in memory order (a view)."""
        if len(order) != node.meta["val"].dim() or list(order) == sorted(order):
            return node
        return self._add_forward(aten.permute.default, (node, list(order)), f"{node.name}_dense")

    def _as_bytes(self, mask: fx.Node, order: Sequence[int]) -> fx.Node:
        """A boolean node as bytes, computed in memory order.

        Bytes, by way of floats, because Inductor's C++ stores booleans element by element: writing 2 million of them
        took 8.7 ms, as bytes 0.1 ms (torch 2.13, AVX-512, 2 cores).
        """
        view = self._laid_out(self._in_order(mask, order), mask)
        number = self._add_forward(convert, (view, torch.float32), f"{mask.name}_number")
        return self._add_forward(convert, (number, torch.uint8), f"{mask.name}_bytes")

    def _laid_out(self, view: fx.Node, source: fx.Node) -> fx.Node:
        """``view`` of what is computed for the codes, in its order: Inductor would choose another, and transpose."""
        if view is source:
            return view
        name, dense = f"{source.name}_laid_out", torch.contiguous_format
        return self._add_forward(aten.clone.default, (view,), name, memory_format=dense)

    def _add_forward(self, target: Any, args: tuple[Any, ...], name: str, **kwargs: Any) -> fx.Node:
        """A call right after the last use of what it reads."""
        graph = self._pair.forward.graph
        nodes: list[fx.Node] = []
        fx.map_arg(args, nodes.append)
        users = [user for node in nodes for user in node.users if user.op != "output"]
        with graph.inserting_after(latest(self._pair.forward, nodes + users)):
            return add_call(graph, target, args, name, **kwargs)
