"""Find what forward saves for backward, and who else holds its memory."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import getitem

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import behind
from gact_fx.graphs.module_names import module_path
from gact_fx.graphs.operator_table import REORDERS
from gact_fx.graphs.operators import packet_of
from gact_fx.graphs.sizes import batch_rows, elements_of_row, have_same_shape, hint, is_symbolic
from gact_fx.graphs.tensors import storage_key
from gact_fx.passes.graph_analysis import memory_order
from gact_fx.passes.pipeline import Context
from gact_fx.records import Boundary, SavedTensor

aten = torch.ops.aten


def find_saved_tensors(pair: GraphPair, context: Context) -> tuple[SavedTensor, ...]:
    """One for every saved value, in the order of forward's outputs.

    Storages are compared through the fake tensors of tracing, so that views of one buffer get one number.
    """
    storages: dict[int, int] = {}
    owners: dict[int, str] = {}
    for node in pair.forward.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and node.name not in pair.upstream_inputs:
            owners[storage_key(value)] = "parameter" if node.name in pair.static_inputs else "caller"
    for output in pair.forward_outputs[: pair.num_user_outputs]:
        value = output.meta.get("val") if isinstance(output, fx.Node) else None
        if isinstance(value, torch.Tensor):
            owners.setdefault(storage_key(value), "output")
    tensors = []
    saved_values = pair.saved_values()
    inputs = pair.forward.graph.find_nodes(op="placeholder")
    rows = batch_rows([node for node in inputs if node.name not in pair.static_inputs])
    # How elements are laid out says nothing about what was saved, and differs where shapes are dynamic.
    producers = [_producer(saved.source) for saved in saved_values]
    for saved, producer, key in zip(saved_values, producers, _keys(pair, producers), strict=True):
        names = (saved.name, key, _op_name(producer), module_path(producer))
        value = saved.source.meta.get("val")
        if not isinstance(value, torch.Tensor):
            tensors.append(SavedTensor(*names, (), (), None, -1, 0, "symbol"))
            continue
        storage = storage_key(value)
        tensor = SavedTensor(
            *names,
            shape=tuple(hint(size) for size in value.shape),
            stride=tuple(hint(step) for step in value.stride()),
            dtype=value.dtype,
            storage=storages.setdefault(storage, len(storages)),
            storage_nbytes=hint(value.untyped_storage().nbytes()),
            owner=owners.get(storage, "nobody"),
            dynamic=any(is_symbolic(size) for size in (*value.shape, *value.stride())),
            boundary=_boundary(saved.source, pair),
            replaced_nbytes=context.replaced.get(saved.name),
        )
        if memory_order(tensor.stride)[:1] == (0,):
            tensor = replace(tensor, row_numel=elements_of_row(value, rows))
        tensors.append(tensor)
    return tuple(tensors)


def _producer(node: fx.Node) -> fx.Node:
    """What made the elements that ``node`` has, whatever order these lie in."""
    while True:
        node = behind(node, REORDERS)
        parent = node.all_input_nodes[0] if packet_of(node) in (aten.slice, aten.expand) else None
        # Where sizes vary, what leaves nothing out is still there.
        if parent is None or not have_same_shape(node.meta["val"], parent.meta["val"]):
            return node
        node = parent


def _keys(pair: GraphPair, producers: Sequence[fx.Node]) -> list[str]:
    """Operator and occurrence, counted in the order in which forward computes them.

    Inputs are counted as they are saved, what earlier graphs computed before what is held anyway: traced anew, a graph
    may have them in another order.
    """
    place = {node: at for at, node in enumerate(pair.forward.graph.nodes)}
    for node in pair.forward.graph.find_nodes(op="placeholder"):
        place[node] = -2 if node.name in pair.upstream_inputs else -1
    counts: Counter[str] = Counter()
    keys = [""] * len(producers)
    for index in sorted(range(len(producers)), key=lambda index: place[producers[index]]):
        op = _op_name(producers[index])
        keys[index] = f"{op}#{counts[op]}"
        counts[op] += 1
    return keys


def _boundary(saved: fx.Node, pair: GraphPair) -> Boundary | None:
    """Which activation that forward gets from earlier graphs, or returns, shares the memory of ``saved``."""
    inputs = enumerate(pair.forward.graph.find_nodes(op="placeholder"))
    found = [(Boundary(True, i), node) for i, node in inputs if node.name in pair.upstream_inputs]
    results = enumerate(pair.forward_outputs[: pair.num_user_outputs])
    found += [(Boundary(False, i), node) for i, node in results if isinstance(node, fx.Node)]
    key = storage_key(saved.meta["val"])
    memory = ((where, node.meta.get("val")) for where, node in found)
    return next((where for where, x in memory if isinstance(x, torch.Tensor) and storage_key(x) == key), None)


def _op_name(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.target is getitem and isinstance(node.args[0], fx.Node):
        return f"{_op_name(node.args[0])}[{node.args[1]}]"
    return str(node.target).removesuffix(".default")
