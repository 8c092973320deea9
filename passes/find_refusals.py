"""Find which saved tensors stay as they are whatever backward does with them, and why."""

import torch
from torch import fx

from gact_fx.codec.layout import SOURCE_DTYPES
from gact_fx.graphs.aot import GraphPair, SavedValue
from gact_fx.graphs.edit import ancestors, readers
from gact_fx.graphs.operator_table import CASTS, PRODUCTS, REDUCTIONS, REORDERS, STATISTICS
from gact_fx.graphs.operators import packet_of
from gact_fx.graphs.sizes import SizeBuilder, is_symbolic
from gact_fx.passes.find_masks import draws
from gact_fx.records import SavedTensor

STATISTIC = "a statistic of rows or channels"
_OWNERS = {
    "parameter": "a parameter or buffer, held anyway",
    "caller": "an input that the caller holds",
    "symbol": "not a tensor",
}


def find_refusals(pair: GraphPair, saved: tuple[SavedTensor, ...], *, min_elements: int) -> dict[str, str]:
    """Of every saved tensor, by name, the reason why it is kept exact; '' where there is none."""
    values = {value.name: value for value in pair.saved_values()}
    sizes = SizeBuilder(pair.backward.graph)
    return {t.name: _refusal(t, values[t.name], pair, min_elements, sizes) for t in saved}


def _refusal(tensor: SavedTensor, value: SavedValue, pair: GraphPair, min_elements: int, sizes: SizeBuilder) -> str:
    node = value.source
    if tensor.owner in _OWNERS:
        return _OWNERS[tensor.owner]
    if tensor.dtype not in (*SOURCE_DTYPES, torch.bool):
        return f"gact_fx does not round {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.numel < max(min_elements, 1):
        return f"fewer than {max(min_elements, 1)} elements"
    if tensor.nbytes > tensor.storage_nbytes:
        return "an expanded view, whose memory is smaller than its codes would be"
    if tensor.dtype is not torch.bool and _is_statistic(node) and not _is_factor(value.placeholder):
        return STATISTIC
    roots = [i for i in ancestors([node]) if (i.op in ("placeholder", "get_attr") and not _is_size(i)) or draws(i)]
    if all(root.name in pair.static_inputs for root in roots):
        return "computed from parameters alone" if roots else "a constant"
    if tensor.dynamic and not sizes.can_build(list(node.meta["val"].shape)):
        return "its size is not known in backward"
    return ""


def _is_statistic(node: fx.Node) -> bool:
    """Whether ``node`` is a reduction, or pointwise work on reductions alone (``rsqrt(var + eps)``)."""
    packet = packet_of(node)
    if node.op != "call_function":
        return False
    if packet is None:  # getitem
        parent, index = packet_of(node.args[0]), node.args[1]
        return parent in REDUCTIONS or index in STATISTICS.get(parent, ())
    if packet in REDUCTIONS:
        return True
    is_local = torch.Tag.pointwise in getattr(node.target, "tags", ()) or packet in REORDERS
    inputs = [i for i in node.all_input_nodes if not _is_size(i)]
    return is_local and bool(inputs) and all(_is_statistic(i) for i in inputs)


def _is_factor(node: fx.Node) -> bool:
    """Whether matrix products alone read ``node``, as they do the features that are the mean of a sequence or image."""
    found = readers(node, REORDERS | CASTS)
    return bool(found) and all(packet_of(reader) in PRODUCTS - REDUCTIONS for reader in found)


def _is_size(node: fx.Node) -> bool:
    return is_symbolic(node.meta.get("val"))
