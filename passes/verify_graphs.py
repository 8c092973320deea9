"""Verify a rewritten pair of graphs: the contract between the passes and AOTAutograd."""

import torch
from torch import fx

from gact_fx.codec import host_copies  # noqa: F401  (register their operators)
from gact_fx.codec.code import Code
from gact_fx.errors import GactError
from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.operator_table import FUSED_ATTENTION

compress = torch.ops.gact_fx.compress.default
decompress = torch.ops.gact_fx.decompress.default
behind = torch.ops.gact_fx.behind.default
to_host, fetch, arrive = (getattr(torch.ops.gact_fx, name).default for name in ("to_host", "fetch", "arrive"))


class GraphVerificationError(GactError, RuntimeError):
    """A pass broke a graph; the message names the node. Always a bug in gact_fx, never in the model."""


def verify_graphs(pair: GraphPair, saved: tuple[str, ...]) -> None:
    """Check ``pair`` against the slots ``saved`` that it had before it was rewritten.

    Raises:
        GraphVerificationError: see the message.
    """
    for label, module in (("forward", pair.forward), ("backward", pair.backward)):
        module.graph.lint()
        names = [node.name for node in module.graph.nodes]
        _require(len(names) == len(set(names)), f"{label} has two nodes of one name")
        for node in module.graph.find_nodes(op="placeholder"):
            # A renamed placeholder keeps its old target, and then receives another argument's value.
            _require(node.name == node.target, f"{label} placeholder {node.name} has the target {node.target}")
        for node in module.graph.find_nodes(op="call_function", target=decompress):
            _require(bool(node.users), f"{label} decompresses {node.name} for nobody")
        for node in (n for n in module.graph.nodes if n.target in FUSED_ATTENTION.values()):
            heads = [i.meta["val"] for i in node.args[:3]]
            are_dense = all(head.stride(-1) == 1 or head.shape[-1] == 1 for head in heads)
            _require(are_dense, f"{label} has {node.name} read heads whose elements lie apart")
    count = len(pair.forward_outputs)
    for key in ("desc", "output_stack_traces"):
        entries = pair.forward.graph.output_node().meta.get(key)
        _require(entries is None or len(entries) == count, f"forward's output has stale meta {key!r}")
    values = pair.saved_values()
    _require(tuple(v.name for v in values) == saved, "the saved tensors changed their number or order")
    for value in values:
        is_same = _same(value.source, value.placeholder)
        _require(is_same, f"{value.name} leaves forward as one thing and enters backward as another")
    for value in values:
        is_dropped = value.source.target is torch.ops.aten.full.default and value.source.args[0] == [0]
        _require(not (is_dropped and value.placeholder.users), f"{value.name} was dropped, and backward reads it")
    blobs: dict[object, fx.Node] = {}
    for value in values:
        blob, held = value.source, value.placeholder
        if blob.target is to_host:
            blob, held = blob.all_input_nodes[0], _fetched(value.placeholder)
        if blob.target is compress:
            readers = {user.name for user in held.users if user.target not in (decompress, arrive, behind)}
            _require(not readers, f"{value.name} is a blob, and {sorted(readers)} read it as values")
            blobs[held] = blob
    for node in pair.backward.graph.find_nodes(op="call_function", target=decompress):
        blob = node.args[0]
        while blob.target is behind:
            blob = blob.args[0]
        source = blobs.get(blob)
        _require(source is not None, f"{node.name} does not read a saved blob")
        assert source is not None
        if node.meta["val"].dtype.is_floating_point:
            # Dither reads wrong values with any other code than what wrote them.
            written, read = Code.of_compress(source.args), Code.of_decompress(node.args)
            _require(written == read, f"{node.name} reads {read} what was written as {written}")


def _fetched(placeholder: fx.Node) -> fx.Node:
    """What backward reads of a blob that was moved to host memory: nothing but what is fetched, once it has arrived."""
    if not placeholder.users:
        return placeholder
    first = min(placeholder.users)
    _require(list(placeholder.users) == [first] and first.target is fetch, f"{placeholder.name} is read in host memory")
    _require(min(first.users).target is arrive, f"{first.name} is read before it has arrived")
    return first


def _same(source: fx.Node, placeholder: fx.Node) -> bool:
    left, right = source.meta.get("val"), placeholder.meta.get("val")
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and left.dim() == right.dim()
    return type(left) is type(right)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise GraphVerificationError(
            f"gact_fx: {message}; please report this, and train with budget_bits=None meanwhile"
        )
