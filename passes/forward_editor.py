"""Edits of the forward graph: what encodings need to put a blob in a saved tensor's place."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from gact_fx.codec import operators  # noqa: F401  (registers torch.ops.gact_fx)
from gact_fx.codec.code import Code
from gact_fx.graphs.aot import GraphPair, SavedValue
from gact_fx.graphs.edit import add_call, add_full, latest, restored

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default


class ForwardEditor:
    """Edits the forward graph of ``pair``; of backward, which stays as it is, it copies what forward is to compute.

    ``backward`` are the nodes of backward by name, ``aliases`` by host the saved values that a host's blob serves.
    """

    def __init__(self, pair: GraphPair, aliases: Mapping[str, Sequence[SavedValue]]) -> None:
        self.aliases = aliases
        self.backward = {node.name: node for node in pair.backward.graph.nodes}
        self._pair = pair
        self._forward = {node.name: node for node in pair.forward.graph.nodes}
        self._values = {value.name: value for value in pair.saved_values()}
        self._sources = {value.placeholder: value.source for value in self._values.values()}

    def save(self, value: SavedValue, replacement: fx.Node) -> None:
        """Save ``replacement`` in the slot of ``value``."""
        self._pair.replace_saved(value, replacement)

    def drop(self, name: str) -> None:
        """Save an empty tensor in the slot of the value ``name``, which nobody reads."""
        value = self._values[name]
        if value.source.op != "placeholder":
            graph = self._pair.forward.graph
            with graph.inserting_before(graph.output_node()):
                self.save(value, add_full(graph, [0], 0, value.source.meta["val"]))

    def add(self, target: Any, args: tuple[Any, ...], name: str, **kwargs: Any) -> fx.Node:
        """A call right after the last use of what it reads."""
        graph = self._pair.forward.graph
        nodes: list[fx.Node] = []
        fx.map_arg(args, nodes.append)
        users = [user for node in nodes for user in node.users if user.op != "output"]
        with graph.inserting_after(latest(self._pair.forward, nodes + users)):
            return add_call(graph, target, args, name, **kwargs)

    def compress(self, dense: fx.Node, code: Code, slot: str, mask: fx.Node | None = None) -> fx.Node:
        """The blob of a tensor in memory order, with a mask behind its codes."""
        return self.add(torch.ops.gact_fx.compress.default, (dense, *code.to_compress(mask)), f"{slot}_blob")

    def derive(self, node: fx.Node) -> fx.Node:
        """The forward node with the value of backward's ``node``, copied over with what it needs where missing."""
        if node in self._sources:
            return self._sources[node]
        inputs = {i: self.derive(i) for i in node.all_input_nodes}
        twin: fx.Node | None = self._forward.get(node.name)
        # The partitioner leaves a recomputed node its name in both graphs.
        if twin is not None and twin.target is node.target:
            arguments = fx.map_arg((node.args, node.kwargs), lambda i: inputs[i])
            if arguments == (twin.args, twin.kwargs):
                return twin
        # Of a decision that backward spells out forward has the result.
        spelled: fx.Node | None = self._forward.get(node.meta.get("spells", ""))
        if spelled is not None and {*spelled.all_input_nodes} <= {*inputs.values()}:
            return spelled
        graph = self._pair.forward.graph
        with graph.inserting_after(latest(self._pair.forward, list(inputs.values()))):
            copy = graph.node_copy(node, lambda i: inputs[i])
        self._forward[node.name] = copy
        return copy

    def packed_masks(self, slot: str, masks: Sequence[str], order: Sequence[int]) -> fx.Node | None:
        """The backward nodes ``masks`` as one boolean node of forward, or None."""
        found = [self.as_bytes(self.derive(self.backward[name]), order) for name in masks]
        if len(found) <= 1:
            return found[0] if found else None
        return self.joined(found)

    def joined(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """The elements of ``nodes``, each row by row, one behind the other."""
        flat = [self.add(aten.reshape.default, (node, [-1]), f"{node.name}_flat") for node in nodes]
        return flat[0] if len(flat) == 1 else self.add(aten.cat.default, (flat,), f"{nodes[0].name}_joined")

    def in_order(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        """``node`` with its dimensions in memory order (a view)."""
        if len(order) != node.meta["val"].dim() or list(order) == sorted(order):
            return node
        return self.add(aten.permute.default, (node, list(order)), f"{node.name}_dense")

    def copied(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        """A copy of ``node`` without gaps, with the dimensions in memory ``order``."""
        dense = self.in_order(node, order)
        copy = self.add(aten.clone.default, (dense,), f"{node.name}_copy", memory_format=torch.contiguous_format)
        with self._pair.forward.graph.inserting_after(copy):
            return restored(self._pair.forward.graph, copy, order)

    def as_bytes(self, mask: fx.Node, order: Sequence[int]) -> fx.Node:
        """A boolean node as bytes, computed in memory order.

        Bytes, by way of floats, because Inductor's C++ stores booleans element by element: writing 2 million of them
        took 8.7 ms, as bytes 0.1 ms (torch 2.13, AVX-512, 2 cores).
        """
        view = self.laid_out(self.in_order(mask, order), mask)
        number = self.add(convert, (view, torch.float32), f"{mask.name}_number")
        return self.add(convert, (number, torch.uint8), f"{mask.name}_bytes")

    def laid_out(self, view: fx.Node, source: fx.Node) -> fx.Node:
        """``view`` of what is computed for the codes, in its order: Inductor would choose another, and transpose."""
        if view is source:
            return view
        return self.add(aten.clone.default, (view,), f"{source.name}_laid_out", memory_format=torch.contiguous_format)
