"""Find what forward saves for backward, and who else holds its memory."""

from __future__ import annotations

from operator import getitem as _getitem

import torch
from torch import fx

from gact_fx.aot import GraphPair
from gact_fx.records import SavedTensor
from gact_fx.symbolic import hint, is_symbolic


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
    return tuple(_record(value.name, value.source, storages, owners) for value in pair.saved_values())


def _record(name: str, node: fx.Node, storages: dict[int, int], owners: dict[int, str]) -> SavedTensor:
    value = node.meta.get("val")
    op, module = _op_name(node), _module_path(node)
    if not isinstance(value, torch.Tensor):
        return SavedTensor(name, op, module, (), (), None, -1, 0, "symbol")
    key = _storage_key(value)
    return SavedTensor(
        name=name,
        op=op,
        module=module,
        shape=tuple(hint(size) for size in value.shape),
        stride=tuple(hint(step) for step in value.stride()),
        dtype=value.dtype,
        storage=storages.setdefault(key, len(storages)),
        storage_nbytes=hint(value.untyped_storage().nbytes()),
        owner=owners.get(key, "nobody"),
        dynamic=any(is_symbolic(size) for size in (*value.shape, *value.stride())),
    )


def _storage_key(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


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


