"""The boundary with AOTAutograd: the only module that knows its calling convention.

Forward outputs are ``[user outputs…] + saved tensors (version-checked, then not) + opaque + symints``; backward inputs
are ``symints + saved tensors + opaque + tangents``. The partitioner gives a saved value the same name in both graphs.
Everyone else sees :class:`GraphPair` and :class:`SavedValue`.

Private, tried with torch 2.11 and 2.13:

- that convention itself, the placeholders called "tangents", and the descriptors in ``meta["desc"]`` with their
  ``output``, ``grad_of``, ``mutated_input`` and ``idx`` (public would be a signature beside the graphs, as
  ``torch.export`` gives one);
- ``functorch.compile.min_cut_rematerialization_partition`` (public would be the partitioner in ``torch.compiler``), and
  ``torch._functorch.config`` with its options ``aggressive_recomputation`` and ``activation_memory_budget`` (arguments
  of the partitioner);
- ``meta["recompute"]`` with ``meta["ac_graph_id"]``, which the partitioner reads as marks of checkpointing, and
  ``meta["saved_tensor_with_no_vc_check"]``;
- ``OpOverload.is_view``, and ``fake_mode`` of the fake tensors in ``meta["val"]``.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gact_fx.graphs.edit import add_call, ancestors, copy_module, dependents
from gact_fx.graphs.operators import returns_alias
from gact_fx.graphs.tensors import storage_key
from gact_fx.graphs.trees import tree_leaves

aten = torch.ops.aten


@dataclass(frozen=True)
class Repeats:
    """How often one call of a model runs a graph, and whether all of these runs read the same parameters."""

    calls: int = 1
    are_tied: bool = True


ONCE = Repeats()


@dataclass(frozen=True)
class GraphPair:
    """A partitioned forward and backward graph.

    ``num_user_outputs`` counts the forward outputs before the saved values; ``static_inputs`` names the forward
    placeholders that are parameters or buffers and that forward leaves as they are; ``upstream_inputs`` those that an
    earlier compiled graph produced (activations that nobody else needs to hold).
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_user_outputs: int
    static_inputs: frozenset[str]
    upstream_inputs: frozenset[str]
    repeats: Repeats = ONCE

    @property
    def forward_outputs(self) -> tuple[Any, ...]:
        return tuple(self.forward.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def backward_outputs(self) -> tuple[Any, ...]:
        return tuple(self.backward.graph.output_node().args[0])  # type: ignore[arg-type]

    def saved_values(self) -> "list[SavedValue]":
        """What forward hands to backward, in the order of forward's outputs."""
        saved = list(enumerate(self.forward_outputs))[self.num_user_outputs :]
        symbols = sum(1 for _, node in saved if isinstance(node.meta["val"], torch.SymInt))
        placeholders = self.backward.graph.find_nodes(op="placeholder")
        # Symbols come last out of forward and first into backward.
        placeholders = placeholders[symbols : len(saved)] + placeholders[:symbols]
        return [
            SavedValue(placeholder.name, position, node, placeholder)
            for (position, node), placeholder in zip(saved, placeholders, strict=True)
        ]

    def tangents(self) -> frozenset[str]:
        """Names of the backward placeholders that are not saved by forward: tangents and backward seeds."""
        count = len(self.forward_outputs) - self.num_user_outputs
        return frozenset(node.name for node in self.backward.graph.find_nodes(op="placeholder")[count:])

    def tangents_of_outputs(self) -> dict[int, str]:
        """Forward output position → the backward placeholder with its tangent, for user outputs that have one."""
        # Graphs whose random operators AOTAutograd has made functional come without descriptions.
        descriptions = (self.forward.graph.output_node().meta.get("desc") or ())[: self.num_user_outputs]
        placeholders = self.backward.graph.find_nodes(op="placeholder")
        of = {getattr(placeholder.meta.get("desc"), "output", None): placeholder.name for placeholder in placeholders}
        return {i: of[d] for i, d in enumerate(descriptions) if d is not None and d in of}

    def gradients_of_inputs(self) -> dict[int, int]:
        """Backward output position → the forward input whose gradient it is."""
        placeholders = self.forward.graph.find_nodes(op="placeholder")
        of = {placeholder.meta.get("desc"): position for position, placeholder in enumerate(placeholders)}
        descriptions = self.backward.graph.output_node().meta.get("desc") or ()
        sources = [getattr(description, "grad_of", None) for description in descriptions]
        return {i: of[source] for i, source in enumerate(sources) if source is not None and source in of}

    def replace_saved(self, value: "SavedValue", replacement: fx.Node) -> None:
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


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward in one graph, as AOTAutograd traces them, with what it says of them.

    ``inputs`` are the values that the graph was traced with; ``upstream(i)`` says whether flat input ``i`` is an
    activation, ``foreign(i)`` whether its memory is not PyTorch's alone; ``compiler`` names what the partitioner cuts
    for.
    """

    joint: fx.GraphModule
    inputs: Sequence[object]
    upstream: Callable[[int], bool]
    num_fwd_outputs: int
    static_lifetime_input_indices: Sequence[int] | None = None
    compiler: str = "inductor"
    foreign: Callable[[int], bool] = lambda index: False
    repeats: Repeats = ONCE

    def copy(self) -> "JointGraph":
        """The same with a graph of its own."""
        return replace(self, joint=copy_module(self.joint))

    def parameters(self) -> frozenset[fx.Node]:
        """The placeholders of parameters and buffers that forward leaves as they are."""
        inputs = self.joint.graph.find_nodes(op="placeholder")
        static = self.static_lifetime_input_indices or ()
        return frozenset(inputs[index] for index in static if index < len(inputs)) - self.mutated_inputs()

    def held_inputs(self) -> frozenset[fx.Node]:
        """The placeholders of what the caller gives and holds, a batch, and of `parameters`."""
        return self._given() - self.foreign_inputs() - self.mutated_inputs() | self.parameters()

    def foreign_inputs(self) -> frozenset[fx.Node]:
        """The placeholders of a batch that NumPy, or another process, may write to before backward runs.

        What backward has to read as it is, in eager PyTorch as well, is none of them.
        """
        before = set(self.before_tangents())
        foreign = {node for node in self._given() if self.foreign(node.meta["desc"].idx)}
        return frozenset(node for node in foreign if not _is_read_outside(node, before)) - self.parameters()

    def _given(self) -> frozenset[fx.Node]:
        """The placeholders of what neither an earlier graph nor AOTAutograd has made."""
        inputs = set(self.joint.graph.find_nodes(op="placeholder")).intersection(self.before_tangents())
        indices = {node: getattr(node.meta.get("desc"), "idx", None) for node in inputs}
        return frozenset(n for n, index in indices.items() if isinstance(index, int) and not self.upstream(index))

    def before_tangents(self) -> list[fx.Node]:
        """The nodes that do not depend on tangents: forward, and what backward could share with it."""
        # The partitioner itself tells tangents by this name.
        depends = dependents(self.joint.graph, lambda node: node.op == "placeholder" and "tangents" in str(node.target))
        return [node for node in self.joint.graph.nodes if node not in depends and node.op != "output"]

    def forward(self) -> set[fx.Node]:
        """The nodes that the results of the forward pass are computed from."""
        results = tree_leaves(self.joint.graph.output_node().args)[: self.num_fwd_outputs]
        return ancestors(node for node in results if isinstance(node, fx.Node))

    def mutated_inputs(self) -> frozenset[fx.Node]:
        """The inputs that are written to by the time backward runs.

        AOTAutograd makes every mutation of an input the last thing that forward does: a ``copy_`` in the graph, or an
        output that the caller of the graph copies.
        """
        graph = self.joint.graph
        copies = [node for node in self.before_tangents() if node.target is aten.copy_.default]
        descriptions = (graph.output_node().meta.get("desc") or ())[: self.num_fwd_outputs]
        returned = {getattr(description, "mutated_input", None) for description in descriptions} - {None}
        targets = {node.args[0] for node in copies}
        inputs = graph.find_nodes(op="placeholder")
        return frozenset(node for node in inputs if node in targets or node.meta.get("desc") in returned)

    def copy_mutated_inputs(self) -> frozenset[str]:
        """Have everything read copies of the inputs that are written to, so that backward gets them as they were.

        Edits the graph in place; returns the copies' names.
        """
        mutated = self.mutated_inputs()
        inputs = [node for node in self.joint.graph.find_nodes(op="placeholder") if node in mutated]
        return frozenset(_read_copy(self.joint.graph, node) for node in inputs)

    def partition(self, *, is_free: bool, copies: frozenset[str]) -> GraphPair:
        """Cut the graph in two with PyTorch's min-cut partitioner.

        With ``is_free`` everything may be recomputed that is not marked otherwise, without the partitioner's own rules
        of thumb. ``copies`` names the copies of mutated inputs. ``torch._functorch.config.activation_memory_budget``
        is left aside: under a budget the partitioner draws dropout anew in backward (torch 2.13).
        """
        import torch._functorch.config as functorch_config
        from functorch.compile import min_cut_rematerialization_partition

        parameters = self.parameters()
        static = list(self.static_lifetime_input_indices or ())
        options = {"num_fwd_outputs": self.num_fwd_outputs, "static_lifetime_input_indices": static}
        with functorch_config.patch(aggressive_recomputation=is_free, activation_memory_budget=1.0):
            forward, backward = min_cut_rematerialization_partition(self.joint, self.inputs, self.compiler, **options)
        _forget_unsaved(forward, copies)
        # The partitioner gives an input its name in both graphs; what AOTAutograd made up has no index.
        static_names = frozenset(node.name for node in parameters)
        inputs = forward.graph.find_nodes(op="placeholder")
        indices = {node.name: getattr(node.meta.get("desc"), "idx", None) for node in inputs}
        upstream = {name for name, index in indices.items() if isinstance(index, int) and self.upstream(index)}
        upstream -= static_names
        return GraphPair(
            forward, backward, self.num_fwd_outputs, static_names, frozenset(upstream), repeats=self.repeats
        )


def _read_copy(joint: fx.Graph, mutated: fx.Node) -> str:
    """Have everything read a copy of a mutated input, so that it is the copy that backward gets; the copy's name."""
    with joint.inserting_after(joint.find_nodes(op="placeholder")[-1]):
        copy = add_call(joint, aten.clone.default, (mutated,), f"{mutated.name}_before")
    # Computed again, it would be a copy of what backward finds.
    copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    copy.meta["ac_graph_id"] = 0
    mutation = (aten.copy_.default, "output")
    mutated.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy and user.target not in mutation)
    _move_views(copy)
    return copy.name


def _move_views(copy: fx.Node) -> None:
    """Give the views of ``copy`` its storage, by which it is told later who holds the memory of a saved tensor."""
    moved = {copy}
    for node in copy.graph.nodes:
        is_view = node.target is getitem or getattr(node.target, "is_view", False)
        if is_view and not moved.isdisjoint(node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with copy.meta["val"].fake_mode:
                node.meta["val"] = node.target(*args, **kwargs)
            moved.add(node)


def _forget_unsaved(forward: fx.GraphModule, copies: frozenset[str]) -> None:
    """Spare forward the copies of which backward asked for neither themselves nor views."""
    outputs = [node.meta.get("val") for node in forward.graph.output_node().all_input_nodes]
    storages = {storage_key(value) for value in outputs if isinstance(value, torch.Tensor)}
    for node in forward.graph.find_nodes(op="call_function", target=aten.clone.default):
        if node.name in copies and storage_key(node.meta["val"]) not in storages:
            node.replace_all_uses_with(node.args[0])
            forward.graph.erase_node(node)
    forward.recompile()


def _is_read_outside(node: fx.Node, nodes: Collection[fx.Node]) -> bool:
    """Whether an operator that is none of ``nodes`` reads ``node``, or a view of it."""
    users = [user for user in node.users if user.op != "output"]
    views = [user for user in users if user in nodes and returns_alias(user.target)]
    return any(user not in nodes for user in users) or any(_is_read_outside(view, nodes) for view in views)
