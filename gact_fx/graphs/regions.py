"""Regions that ``torch.compiler.nested_compile_region`` marks: cuts a graph into them and what lies between.

Equal regions are then one graph, which is compiled once and runs as often as the model calls it.

Private, tried with torch 2.13: ``torch.ops.higher_order.invoke_subgraph`` with its arguments (body, name, inputs), by
which Dynamo calls a region; ``meta["example_value"]``, ``meta["tensor_dict"]``, ``_dynamo_source`` and
``_param_name_to_source``, by which AOTAutograd tells parameters; ``torch._guards.detect_fake_mode`` and
``torch._dynamo.utils.to_fake_tensor``, which give a tensor the sizes that Dynamo has traced it with (public would be
regions that a backend gets as graphs of their own).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, cast

import torch
from torch import fx

from gact_fx.graphs.aot import Repeats
from gact_fx.graphs.compilers import Compiled
from gact_fx.graphs.hooks import paused
from gact_fx.graphs.tensors import is_foreign, storage_key
from gact_fx.graphs.trees import tree_leaves

_CALL = torch.ops.higher_order.invoke_subgraph
# (a part's graph, what it is compiled with, what that stands for, how often it runs) -> what runs it
Compile = Callable[[fx.GraphModule, Sequence[Any], Sequence[Any], Repeats], Compiled]


@dataclass(frozen=True)
class Part:
    """A piece of a graph, a marked region or what lies before, between or behind them.

    ``inputs`` and ``outputs`` are nodes of the whole graph, None for what nobody reads. Equal regions have one body.
    """

    body: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node | None, ...]


def cut_at_regions(module: fx.GraphModule) -> list[Part]:
    """The parts of ``module`` in the order in which they run, none where it has no region.

    Regions that are no parts, since they lie in other higher-order operators (checkpointing, say) or the graph sets
    autocast or the like, become code of the graph: ``module`` is edited.
    """
    _inline_in_bodies(module)
    if not any(map(_is_call, module.graph.nodes)):
        return []
    node: Any
    for node in module.graph.find_nodes(op="call_function", target=getitem):
        # What crosses from part to part are tensors, and not tuples of them.
        if isinstance(node.args[0], fx.Node) and isinstance(node.args[0].meta.get("example_value"), (tuple, list)):
            node.args[0].append(node)
    found = _parts(module)
    crossing = [node for part in found for node in (*part.inputs, *part.outputs) if node is not None]
    if not all(map(_can_cross, crossing)) or any(map(_sets_state, module.graph.nodes)):
        inline_regions(module)
        return []
    return found


def compile_parts(
    module: fx.GraphModule,
    parts: Sequence[Part],
    example_inputs: Sequence[Any],
    given: Sequence[Any],
    repeats: Repeats,
    compile: Compile,
) -> Compiled:
    """What runs ``parts`` of ``module`` one after another, each ``compile``d once for all that equal it.

    ``given`` is what the ``example_inputs`` stand for, and ``repeats`` says how often ``module`` runs.
    """
    values = _fake_values(module, example_inputs)
    placeholders = module.graph.find_nodes(op="placeholder")
    real = values | dict(zip(placeholders, given, strict=True))
    results = module.graph.output_node().args[0]
    last = {node: index for index, part in enumerate(parts) for node in part.inputs}
    last |= {node: len(parts) for node in tree_leaves(results) if isinstance(node, fx.Node)}
    # What runs must not keep the graph, nor what it was traced with.
    slots = {node: slot for slot, node in enumerate(dict.fromkeys((*placeholders, *last)))}
    keys = [_key(part, values, real) for part in parts]
    compiled: dict[Hashable, Compiled] = {}
    steps = []
    for index, (part, key) in enumerate(zip(parts, keys, strict=True)):
        if key not in compiled:
            equal = [other for other, its in zip(parts, keys, strict=True) if its == key]
            _describe(part.body, module, part.inputs)
            inputs, originals = ([known[node] for node in part.inputs] for known in (values, real))
            compiled[key] = compile(part.body, inputs, originals, _repeated(repeats, equal))
        dead = [slots[node] for node in part.inputs if last[node] == index]
        outputs = [None if node is None else slots.get(node) for node in part.outputs]
        steps.append((compiled[key], [slots[node] for node in part.inputs], outputs, dead))
    wanted = [_Slot(slots[x]) if isinstance(x, fx.Node) else x for x in tuple(cast(Any, results))]
    return _in_turn(steps, len(slots), wanted)


@dataclass(frozen=True)
class _Slot:
    index: int


def _in_turn(
    steps: Sequence[tuple[Compiled, Sequence[int], Sequence[int | None], Sequence[int]]], count: int, results: Any
) -> Compiled:
    """Runs ``steps`` on ``count`` values: each a call, what it reads, what it gives, and what is not read again."""

    def run(*arguments: Any) -> Any:
        values: list[Any] = [*arguments, *[None] * (count - len(arguments))]
        for call, inputs, outputs, dead in steps:
            given = [values[slot] for slot in inputs]
            for gone in dead:
                values[gone] = None
            for slot, value in zip(outputs, call(*_emptied(given)), strict=True):
                if slot is not None:
                    values[slot] = value
        return tuple(values[found.index] if isinstance(found, _Slot) else found for found in results)

    return run


def _emptied(values: list[Any]) -> tuple[Any, ...]:
    """The ``values``, held by what is returned alone."""
    found = tuple(values)
    values.clear()
    return found


def _is_call(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is _CALL


def _can_cross(value: object) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("example_value"), (torch.Tensor, torch.SymInt))


def _sets_state(node: fx.Node) -> bool:
    """Whether a call gives nothing, as those do by which the graph enters and leaves autocast."""
    return node.op.startswith("call") and node.meta.get("example_value") is None


def _parts(module: fx.GraphModule) -> list[Part]:
    pieces: list[list[fx.Node]] = [[]]
    calls: dict[int, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if _is_call(node):
            calls[len(pieces)] = node
            pieces += [[node], []]
        elif node.target is getitem and _is_call(node.args[0]):
            pieces[-2].append(node)
        else:
            pieces[-1].append(node)
    return [
        _region(module, calls[index], piece) if index in calls else _between(module, piece)
        for index, piece in enumerate(pieces)
        if piece
    ]


def _region(module: fx.GraphModule, call: Any, piece: Sequence[Any]) -> Part:
    body: fx.GraphModule = getattr(module, call.args[0].target)
    inputs = call.args[2:]
    results: list[Any] = [None] * len(tree_leaves(body.graph.output_node().args))
    for node in piece[1:]:
        results[node.args[1]] = node
    return Part(body, tuple(inputs), tuple(results))


def _between(module: fx.GraphModule, piece: Sequence[fx.Node]) -> Part:
    inside = set(piece)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    sources = dict.fromkeys(source for node in piece for source in node.all_input_nodes if source not in inside)
    inputs = tuple(source for source in sources if source.op != "get_attr")
    for node in (*inputs, *(source for source in sources if source.op == "get_attr"), *piece):
        if node in inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs = tuple(node for node in piece if any(user not in inside for user in node.users))
    graph.output(tuple(copies[node] for node in outputs))
    return Part(fx.GraphModule(module, graph), inputs, outputs)


def _describe(body: fx.GraphModule, module: fx.GraphModule, inputs: Sequence[fx.Node]) -> None:
    """Give ``body`` what Dynamo says of a whole graph, so that AOTAutograd finds the parameters among its inputs."""
    body.meta.update(module.meta)
    body._param_name_to_source = getattr(module, "_param_name_to_source", {})  # type: ignore[assignment]
    for placeholder, source in zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True):
        placeholder._dynamo_source = getattr(source, "_dynamo_source", None)
        placeholder.meta["tensor_dict"] = source.meta.get("tensor_dict", {})


def _key(part: Part, values: Mapping[fx.Node, Any], real: Mapping[fx.Node, Any]) -> Hashable:
    """Equal for parts for which the same code is compiled."""
    first: dict[int, int] = {}
    found: list[Hashable] = [part.body]
    for index, node in enumerate(part.inputs):
        x = values[node]
        if isinstance(x, torch.Tensor):
            alias = first.setdefault(storage_key(x), index)
            kind = str((x.shape, x.stride())), x.dtype, x.device, x.requires_grad, x.is_leaf, is_foreign(real[node])
            found.append((alias, type(x), *kind, _is_static(node)))
        else:
            found.append((type(x), str(x)))
    return tuple(found)


def _is_static(node: fx.Node) -> bool:
    """Whether it is a parameter or a buffer."""
    return bool(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"))


def _repeated(repeats: Repeats, equal: Sequence[Part]) -> Repeats:
    """How often parts run that are ``equal``, in a module that ``repeats``."""
    parameters = {tuple(node for node in part.inputs if _is_static(node)) for part in equal}
    return Repeats(repeats.calls * len(equal), repeats.are_tied and len(parameters) == 1)


class _Fake(fx.Interpreter):
    """Runs a graph on fake tensors, regions as if they were code of the graph, and keeps all values."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is _CALL:
            return _Fake(args[0]).run(*args[2:])
        return super().call_function(target, args, kwargs)


def _fake_values(module: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    """What the nodes give, as tensors without memory that have their sizes, histories and aliases."""
    mode = torch._guards.detect_fake_mode(example_inputs)
    assert mode is not None, "Dynamo compiles within a fake mode"
    inputs = []
    for node, x in zip(module.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        if isinstance(x, torch.Tensor):
            # Regions in a region get those of this mode.
            is_known = getattr(x, "fake_mode", None) is mode
            inputs.append(x if is_known else torch._dynamo.utils.to_fake_tensor(x, mode))
        else:
            inputs.append(node.meta.get("example_value", x))
    fake = _Fake(module)
    # This is no forward pass whose memory counts.
    with paused(), mode:
        fake.run(*inputs)
    return dict(fake.env)


def inline_regions(module: fx.GraphModule) -> None:
    """Put the code of regions in the place of calls of them, also in the graphs that other operators run."""
    _inline_in_bodies(module)
    graph = module.graph
    call: Any
    while calls := [node for node in graph.nodes if _is_call(node)]:
        for call in calls:
            body: fx.GraphModule = getattr(module, call.args[0].target)
            known: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))
            with graph.inserting_before(call):
                for node in body.graph.find_nodes(op="get_attr"):
                    name = f"{call.name}_{node.target}".replace(".", "_")
                    setattr(module, name, getattr(body, node.target))
                    known[node] = graph.get_attr(name)
                results = cast(Any, graph.graph_copy(body.graph, known))
            for user in list(call.users):
                user.replace_all_uses_with(results[user.args[1]])
                graph.erase_node(user)
            graph.erase_node(call)
    module.recompile()


def _inline_in_bodies(module: fx.GraphModule) -> None:
    for node in module.graph.find_nodes(op="get_attr"):
        body = getattr(module, str(node.target), None)
        if isinstance(body, fx.GraphModule) and not any(map(_is_call, node.users)):
            inline_regions(body)
