"""Find what forward saves for backward, and who else holds its memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from operator import getitem as _getitem

import torch
from torch import fx

from gact_fx.aot import GraphPair, SavedValue
from gact_fx.records import Boundary, SavedTensor
from gact_fx.symbolic import hint, is_same, is_symbolic


def find_saved_tensors(pair: GraphPair) -> tuple[SavedTensor, ...]:
    """One record per saved value, in the order of forward's outputs.

    Storages are compared through the fake tensors of tracing, so that views of one buffer get one number.
    """
    storages: dict[int, int] = {}
    owners: dict[int, str] = {}
    for node in pair.forward.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and node.name not in pair.upstream_inputs:
            owners[_storage_key(value)] = "parameter" if node.name in pair.static_inputs else "caller"
    for output in pair.forward_outputs[: pair.num_user_outputs]:
        value = output.meta.get("val") if isinstance(output, fx.Node) else None
        if isinstance(value, torch.Tensor):
            owners.setdefault(_storage_key(value), "output")
    counts: Counter[str] = Counter()
    records = []
    for value in pair.saved_values():
        op = _op_name(_producer(value.source))
        record = _record(value, f"{op}#{counts[op]}", op, storages, owners)
        records.append(record if record.dtype is None else replace(record, boundary=_boundary(value.source, pair)))
        counts[op] += 1
    return tuple(records)


def _record(saved: SavedValue, key: str, op: str, storages: dict[int, int], owners: dict[int, str]) -> SavedTensor:
    value = saved.source.meta.get("val")
    module = _module_path(_producer(saved.source))
    if not isinstance(value, torch.Tensor):
        return SavedTensor(saved.name, key, op, module, (), (), None, -1, 0, "symbol")
    storage = _storage_key(value)
    return SavedTensor(
        name=saved.name,
        key=key,
        op=op,
        module=module,
        shape=tuple(hint(size) for size in value.shape),
        stride=tuple(hint(step) for step in value.stride()),
        dtype=value.dtype,
        storage=storages.setdefault(storage, len(storages)),
        storage_nbytes=hint(value.untyped_storage().nbytes()),
        owner=owners.get(storage, "nobody"),
        dynamic=any(is_symbolic(size) for size in (*value.shape, *value.stride())),
    )


def _boundary(saved: fx.Node, pair: GraphPair) -> Boundary | None:
    """Which activation that forward gets from earlier graphs, or returns, shares the memory of ``saved``."""
    inputs = enumerate(pair.forward.graph.find_nodes(op="placeholder"))
    found = [(Boundary(True, i), node) for i, node in inputs if node.name in pair.upstream_inputs]
    results = enumerate(pair.forward_outputs[: pair.num_user_outputs])
    found += [(Boundary(False, i), node) for i, node in results if isinstance(node, fx.Node)]
    value = saved.meta["val"]
    same_memory = [
        (boundary, node)
        for boundary, node in found
        if isinstance(node.meta.get("val"), torch.Tensor) and _storage_key(node.meta["val"]) == _storage_key(value)
    ]
    for boundary, node in same_memory:
        if _producer(node) is _producer(saved) or _is_same_in_rows(node.meta["val"], value):
            return boundary
    return replace(same_memory[0][0], is_view=True) if same_memory else None


def _is_same_in_rows(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two views of one storage are the same elements in the same order, row by row."""
    # Hints of different numbers may be equal by chance.
    same_dtype_and_start = a.dtype is b.dtype and is_same(a.storage_offset(), b.storage_offset())
    return same_dtype_and_start and is_same(a.numel(), b.numel()) and _lies_in_rows(a) and _lies_in_rows(b)


def _lies_in_rows(value: torch.Tensor) -> bool:
    count: int | torch.SymInt = 1
    for size, step in reversed(list(zip(value.shape, value.stride(), strict=True))):
        if not is_same(size, 1) and not is_same(step, count):
            return False
        count *= size
    return True


def _storage_key(value: torch.Tensor) -> int:
    key: int = value.untyped_storage()._cdata
    return key


def _producer(node: fx.Node) -> fx.Node:
    """The node behind detach and alias, which say nothing about what was saved."""
    while node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        node = node.all_input_nodes[0]
    return node


def _op_name(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.target is _getitem and isinstance(node.args[0], fx.Node):
        return f"{_op_name(node.args[0])}[{node.args[1]}]"
    return str(node.target).removesuffix(".default")


def _module_path(node: fx.Node) -> str:
    """The innermost module that the node was traced in, as ``encoder.layer.0``, or ''."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    for noise in ("L['self'].", "L['self']", "_modules['", "']", "getattr(", "self."):
        path = path.replace(noise, "")
    return path
