"""The boundary with AOTAutograd: the only module that knows its calling convention.

Forward outputs are ``[user outputs…] + saved tensors (version-checked, then not) + opaque + symints``; backward inputs
are ``symints + saved tensors + opaque + tangents``. The partitioner gives a saved value the same name in both graphs.
Everyone else sees :class:`GraphPair` and :class:`SavedValue`. Tried with torch 2.11 and 2.13 (descriptors in
``node.meta["desc"]`` are AOTAutograd's own, and the one private thing used here).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gact_fx.graph_edit import dependents

# Marks those nodes of the joint graph that do not depend on tangents, given the placeholders of parameters and buffers;
# returns whether everything not marked may be recomputed.
Mark = Callable[[Sequence[fx.Node], frozenset[fx.Node]], bool]


@dataclass(frozen=True)
class GraphPair:
    """A partitioned forward and backward graph.

    ``num_user_outputs`` counts the forward outputs before the saved values; ``static_inputs`` names the forward
    placeholders that are parameters or buffers; ``upstream_inputs`` those that an earlier compiled graph produced
    (activations that nobody else needs to hold).
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_user_outputs: int
    static_inputs: frozenset[str]
    upstream_inputs: frozenset[str]

    @property
    def forward_outputs(self) -> tuple[Any, ...]:
        return tuple(self.forward.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def backward_outputs(self) -> tuple[Any, ...]:
        return tuple(self.backward.graph.output_node().args[0])  # type: ignore[arg-type]

    def saved_values(self) -> list[SavedValue]:
        """What forward hands to backward, in the order of forward's outputs."""
        saved = list(enumerate(self.forward_outputs))[self.num_user_outputs :]
        symbols = sum(1 for _, node in saved if isinstance(node.meta["val"], torch.SymInt))
        slots = self.backward.graph.find_nodes(op="placeholder")
        # Symbols come last out of forward and first into backward.
        slots = slots[symbols : len(saved)] + slots[:symbols]
        return [
            SavedValue(slot.name, position, node, slot) for (position, node), slot in zip(saved, slots, strict=True)
        ]

    def tangents(self) -> frozenset[str]:
        """Names of the backward placeholders that are not saved by forward: tangents and backward seeds."""
        count = len(self.forward_outputs) - self.num_user_outputs
        return frozenset(node.name for node in self.backward.graph.find_nodes(op="placeholder")[count:])

    def tangents_of_outputs(self) -> dict[int, str]:
        """Forward output position → the backward placeholder with its tangent, for user outputs that have one."""
        # Graphs whose random operators AOTAutograd has made functional come without descriptions.
        descriptions = (self.forward.graph.output_node().meta.get("desc") or ())[: self.num_user_outputs]
        slots = self.backward.graph.find_nodes(op="placeholder")
        of = {getattr(slot.meta.get("desc"), "output", None): slot.name for slot in slots}
        return {i: of[d] for i, d in enumerate(descriptions) if d is not None and d in of}

    def gradients_of_inputs(self) -> dict[int, int]:
        """Backward output position → the forward input whose gradient it is."""
        slots = self.forward.graph.find_nodes(op="placeholder")
        of = {slot.meta.get("desc"): position for position, slot in enumerate(slots)}
        descriptions = self.backward.graph.output_node().meta.get("desc") or ()
        sources = [getattr(description, "grad_of", None) for description in descriptions]
        return {i: of[source] for i, source in enumerate(sources) if source is not None and source in of}

    def replace_saved(self, value: SavedValue, replacement: fx.Node) -> None:
        """Save ``replacement`` instead of ``value.source``, at the same position and in the same slot of backward."""
        output = self.forward.graph.output_node()
        outputs = list(self.forward_outputs)
        outputs[value.position] = replacement
        if value.source.meta.get("saved_tensor_with_no_vc_check"):
            replacement.meta["saved_tensor_with_no_vc_check"] = True
        output.args = (tuple(outputs),)
        value.placeholder.meta["val"] = replacement.meta["val"]
        value.placeholder.meta.pop("tensor_meta", None)


@dataclass(frozen=True)
class SavedValue:
    """One value saved for backward.

    ``name`` is its slot: the name of the backward placeholder, which no rewrite changes. ``position`` counts forward's
    outputs, ``source`` is what forward returns there.
    """

    name: str
    position: int
    source: fx.Node
    placeholder: fx.Node


def partition(
    joint: fx.GraphModule,
    joint_inputs: Sequence[object],
    upstream: Callable[[int], bool],
    *,
    mark: Mark,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    compiler: str = "inductor",
) -> GraphPair:
    """Cut ``joint`` with PyTorch's min-cut partitioner; ``upstream(i)``: whether flat input ``i`` is an activation.

    ``mark`` says before what may be recomputed; where it returns True, everything that it has not forbidden, without
    the partitioner's own rules of thumb.
    """
    import torch._functorch.config as functorch_config
    from functorch.compile import min_cut_rematerialization_partition

    static = list(static_lifetime_input_indices or ())
    # The partitioner does this first, too; what is marked should be what it sees.
    joint.graph.eliminate_dead_code()
    inputs = joint.graph.find_nodes(op="placeholder")
    parameters = frozenset(inputs[index] for index in static if index < len(inputs))
    is_free = mark(_before_tangents(joint.graph), parameters)
    with functorch_config.patch(aggressive_recomputation=is_free):
        forward, backward = min_cut_rematerialization_partition(
            joint, joint_inputs, compiler, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static
        )
    placeholders = forward.graph.find_nodes(op="placeholder")
    # Forward keeps every primal of the joint graph, in order, so the static indices count its placeholders.
    names = [node.name for node in placeholders]
    static_names = frozenset(names[index] for index in static if index < len(names))
    upstream_names = frozenset(
        node.name
        for node in placeholders
        if node.name not in static_names and (index := _input_index(node)) is not None and upstream(index)
    )
    return GraphPair(forward, backward, num_fwd_outputs, static_names, upstream_names)


def _before_tangents(joint: fx.Graph) -> list[fx.Node]:
    """The nodes of the joint graph that do not depend on tangents: forward, and what backward could share with it."""
    # The partitioner itself tells tangents by this name.
    depends = dependents(joint, lambda node: node.op == "placeholder" and "tangents" in str(node.target))
    return [node for node in joint.nodes if node not in depends and node.op != "output"]


def _input_index(placeholder: fx.Node) -> int | None:
    """Which of the traced function's flat inputs a forward placeholder is, or None where AOTAutograd made it up."""
    index = getattr(placeholder.meta.get("desc"), "idx", None)
    return index if isinstance(index, int) else None
