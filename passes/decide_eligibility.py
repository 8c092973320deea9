"""Decide which saved tensors may be compressed, and how, with a reason for each refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import getitem

import torch
from torch import fx

from gact_fx.codec.layout import SOURCE_DTYPES
from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.sizes import SizeBuilder, hint
from gact_fx.passes.bound_indices import IndexRange, index_range
from gact_fx.passes.find_masks import MaskAnalysis, find_masks, values_read
from gact_fx.passes.find_standardizations import find_standardizations
from gact_fx.passes.find_substitutes import find_substitutes
from gact_fx.passes.merge_masks import find_merge
from gact_fx.records import (
    ALIAS,
    DROP,
    KEEP,
    MASK,
    PACK,
    QUANTIZE,
    Eligibility,
    GraphAnalysis,
    SavedTensor,
)

aten = torch.ops.aten

_TOO_LARGE = "the decisions that follow from it take as much memory as it does"
# Width below which rounding query and key of fused attention biases the gradient: at scores sharpened threefold the
# bias was 12 % at 4 bits, and shrinks fourfold per bit.
CURVED_BITS = 6
_PACKABLE = (torch.int8, torch.int16, torch.int32, torch.int64)
_OWNERS = {
    "parameter": "a parameter or buffer, held anyway",
    "caller": "an input that the caller holds",
    "symbol": "not a tensor",
}
# Reductions whose results are per-row statistics (means, variances, maxima of softmax, logsumexp): few, and every
# element of the row depends on them.
_REDUCTIONS = frozenset(
    {aten.mean, aten.sum, aten.amax, aten.amin, aten.max, aten.min, aten.var_mean, aten.var, aten.std, aten.logsumexp,
     aten.prod, aten.norm, aten.linalg_vector_norm}
)  # fmt: skip
# Outputs of fused operators that are statistics: (operator, index) of the getitem.
_STATISTICS = frozenset(
    {(aten.native_layer_norm, 1), (aten.native_layer_norm, 2), (aten.native_group_norm, 1), (aten.native_group_norm, 2),
     (aten.native_batch_norm, 1), (aten.native_batch_norm, 2), (aten._native_batch_norm_legit_functional, 1),
     (aten._native_batch_norm_legit_functional, 2), (aten._native_batch_norm_legit_functional, 3),
     (aten._native_batch_norm_legit_functional, 4), (aten._scaled_dot_product_flash_attention_for_cpu, 1),
     (aten._scaled_dot_product_flash_attention, 1), (aten._scaled_dot_product_efficient_attention, 1),
     (aten._scaled_dot_product_cudnn_attention, 1)}
)  # fmt: skip
# Results that backward divides by what they came from, or multiplies by an inverse: an error in them grows without
# bound as that comes near zero, or becomes singular.
_MAGNIFIED = frozenset(
    {aten.copysign, aten.linalg_pinv, aten.linalg_inv_ex, aten.linalg_cholesky_ex, aten.linalg_lu_factor_ex,
     aten.linalg_lu, aten.linalg_qr, aten._linalg_svd, aten._linalg_eigh, aten.linalg_eig, aten._linalg_det,
     aten._linalg_slogdet, aten._linalg_solve_ex, aten.linalg_lstsq}
)  # fmt: skip
_INVERTED = (aten.linalg_pinv, aten.linalg_lstsq)
_SCATTERED = (aten.scatter_reduce, aten.index_reduce)


def decide_eligibility(
    pair: GraphPair,
    saved: tuple[SavedTensor, ...],
    *,
    min_elements: int,
    channels_last: frozenset[str] = frozenset(),
    trust_unknown: bool = False,
) -> GraphAnalysis:
    """The encoding of every saved tensor; ``channels_last`` names those that the inner compiler lays out so.

    With ``trust_unknown``, also what operators read that gact_fx does not know.
    """
    sources = {value.name: value.source for value in pair.saved_values()}
    slots = {value.name: value.placeholder for value in pair.saved_values()}
    sizes = SizeBuilder(pair.backward.graph)
    nodes = {node.name: node for node in pair.backward.graph.nodes}
    ranges = {t.name: _index_range(t, sources[t.name], slots[t.name], min_elements) for t in saved}
    bits = {name: _bits(found) for name, found in ranges.items()}
    reasons = {t.name: "" if bits[t.name] else _refusal(t, sources[t.name], pair, min_elements, sizes) for t in saved}
    while True:
        _refuse_shared(saved, reasons)
        lossy = frozenset(t.name for t in saved if not (reasons[t.name] or bits[t.name] or t.dtype is torch.bool))
        masks = find_masks(pair, lossy)
        substitutes = find_substitutes(pair, lossy & masks.values, frozenset(masks.hosts), trust_unknown=trust_unknown)
        mask_numel = _mask_numel(masks, nodes)
        # A comparison of all pairs can be far larger than what is compared.
        too_large = {t.name: _TOO_LARGE for t in saved if mask_numel.get(t.name, 0) / 8 > t.storage_nbytes / 2}
        refused = {**masks.refused, **substitutes.refused, **too_large}
        if not refused.keys() - {name for name, reason in reasons.items() if reason}:
            break
        reasons.update(refused)
    aliases = _aliases(saved, reasons, masks)
    taken: set[str] = set()
    read = values_read(pair, frozenset({*masks.hosts, *substitutes.instead.values()}))
    # Inputs and results lie in memory as they were traced.
    reordered = channels_last - set(aliases.values()) - {t.name for t in saved if t.boundary is not None}
    decisions = []
    for tensor in saved:
        name = tensor.name
        own = tuple(mask for mask, host in masks.hosts.items() if host == name)
        instead = "" if name in aliases or name in aliases.values() else substitutes.instead.get(name, "")
        is_needed = bool(own) or name in read or (instead and instead not in taken)
        if tensor.owner in ("nobody", "output") and not is_needed:
            decisions.append(Eligibility(name, DROP, "backward does not read it"))
            continue
        if bits[name]:
            order = _order(tensor.stride, False)
            reason = "integers of a known range, packed exactly"
            modulus = found.limit if (found := ranges[name]) is not None and found.wraps else None
            decisions.append(Eligibility(name, PACK, reason, order=order, min_bits=bits[name], modulus=modulus))
            continue
        if reasons[name]:
            decisions.append(Eligibility(name, KEEP, reasons[name]))
            continue
        decision = Eligibility(
            name,
            MASK if tensor.dtype is torch.bool else QUANTIZE,
            "boolean, stored exactly" if tensor.dtype is torch.bool else "",
            masks=own,
            mask_numel=mask_numel.get(name, 0),
            min_bits=CURVED_BITS if name in substitutes.curved else 1,
            order=_order(_steps(tensor), name in reordered),
            values=name in masks.values,
        )
        if decision.values and instead:
            taken.add(instead)
            node = nodes[instead]
            order = _order(tuple(hint(step) for step in node.meta["val"].stride()), name in reordered)
            reason = f"stored as what backward makes of it ({node.target})"
            decision = replace(decision, instead=instead, order=order, reason=reason)
        if not decision.values:
            decision = replace(decision, encoding=MASK, reason="backward only compares it")
        if name in aliases:
            reason = f"the same memory as {aliases[name]}"
            decision = Eligibility(name, ALIAS, reason, alias_of=aliases[name], order=_order(tensor.stride, False))
        decisions.append(decision)
    decisions = [replace(how, exact_allowed=not how.masks) for how in decisions]
    decisions = _standardized(pair, decisions, read)
    # Views of the same codes would read NaN.
    shared = {how.alias_of for how in decisions}
    decisions = [
        how if how.name in shared else replace(how, merges=find_merge(how, sources[how.name], slots[how.name], nodes))
        for how in decisions
    ]
    return GraphAnalysis(saved, tuple(decisions))


def _standardized(pair: GraphPair, decisions: list[Eligibility], read: frozenset[str]) -> list[Eligibility]:
    """``decisions``, and what `find_standardizations` finds for quantized tensors whose blob serves no other."""
    shared = {how.alias_of for how in decisions}
    alone = [how for how in decisions if how.encoding == QUANTIZE and how.values and how.name not in shared]
    found = find_standardizations(
        pair,
        {how.name: how.instead for how in alone},
        {how.name: how.masks for how in alone},
        frozenset(how.name for how in decisions if how.encoding == KEEP) & read,
    )
    return [
        replace(how, standardization=by, reason="; ".join(filter(None, (how.reason, "standardised as by batch norm"))))
        if (by := found.get(how.name)) is not None
        else how
        for how in decisions
    ]


def _mask_numel(masks: MaskAnalysis, nodes: Mapping[str, fx.Node]) -> dict[str, int]:
    """Elements of the masks that a tensor carries."""
    total: dict[str, int] = {}
    for mask, host in masks.hosts.items():
        total[host] = total.get(host, 0) + hint(nodes[mask].meta["val"].numel())
    return total


def _refusal(tensor: SavedTensor, node: fx.Node, pair: GraphPair, min_elements: int, sizes: SizeBuilder) -> str:
    if tensor.owner in _OWNERS:
        return _OWNERS[tensor.owner]
    if tensor.dtype not in (*SOURCE_DTYPES, torch.bool):
        return f"{str(tensor.dtype).removeprefix('torch.')} is kept exact"
    if tensor.numel < max(min_elements, 1):
        return f"fewer than {max(min_elements, 1)} elements"
    if tensor.nbytes > tensor.storage_nbytes:
        return "an expanded view, smaller in memory than as values"
    if tensor.dtype is not torch.bool and _is_statistic(node):
        return "a statistic of rows or channels"
    if tensor.dtype is not torch.bool and _is_magnified(node):
        return "backward magnifies its errors, by the inverse of what it came from"
    roots = _roots(node)
    if all(root.name in pair.static_inputs for root in roots):
        return "computed from parameters alone" if roots else "a constant"
    if tensor.dynamic and not sizes.can_build(list(node.meta["val"].shape)):
        return "its size is not known in backward"
    return ""


def _index_range(tensor: SavedTensor, node: fx.Node, slot: fx.Node, min_elements: int) -> IndexRange | None:
    """The range of an integer tensor's elements, None where it is not known or packing would save nothing."""
    is_whole = tensor.owner in ("nobody", "output") and tensor.nbytes == tensor.storage_nbytes and not tensor.dynamic
    if tensor.dtype not in _PACKABLE or not is_whole or tensor.numel < max(min_elements, 1):
        return None
    found = index_range(node)
    if found is not None and found.wraps:
        # Read as anything but an index, -1 is not the last one.
        in_backward = index_range(slot)
        if in_backward is None or in_backward.limit != found.limit:
            return None
    return found if _bits(found) <= min(16, tensor.dtype.itemsize * 8 - 1) else None


def _bits(found: IndexRange | None) -> int:
    """Bits that hold every value exactly, 0 where none are known."""
    return 0 if found is None else max(found.limit - 1, 1).bit_length()


def _is_statistic(node: fx.Node) -> bool:
    """Whether ``node`` is a reduction, or pointwise work on reductions alone (``rsqrt(var + eps)``)."""
    packet = getattr(node.target, "overloadpacket", None)
    if node.op != "call_function":
        return False
    if packet is None:  # getitem
        parent, index = node.args[0], node.args[1]
        parent_packet = getattr(parent.target, "overloadpacket", None) if isinstance(parent, fx.Node) else None
        return parent_packet in _REDUCTIONS or (parent_packet, index) in _STATISTICS
    if packet in _REDUCTIONS:
        return True
    is_local = torch.Tag.pointwise in getattr(node.target, "tags", ()) or packet in (
        aten.view, aten.reshape, aten.squeeze, aten.unsqueeze, aten.permute, aten.clone, aten.detach, aten.alias,
    )  # fmt: skip
    inputs = node.all_input_nodes
    return is_local and bool(inputs) and all(_is_statistic(i) for i in inputs)


def _is_magnified(node: fx.Node) -> bool:
    # These meet their own inverse in backward.
    if any(getattr(user.target, "overloadpacket", None) in _INVERTED for user in node.users):
        return True
    while getattr(node.target, "overloadpacket", None) in (aten.detach, aten.alias) or node.target is getitem:
        node = node.all_input_nodes[0]
    packet = getattr(node.target, "overloadpacket", None)
    return packet in _MAGNIFIED or (packet in _SCATTERED and "prod" in node.args)


def _roots(node: fx.Node) -> set[fx.Node]:
    """The placeholders and random operators that ``node`` is computed from."""
    stack, seen, roots = [node], set(), set()
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        tags = getattr(current.target, "tags", ())
        if current.op in ("placeholder", "get_attr") or torch.Tag.nondeterministic_seeded in tags:
            roots.add(current)
        stack.extend(current.all_input_nodes)
    return roots


def _refuse_shared(saved: tuple[SavedTensor, ...], reasons: dict[str, str]) -> None:
    """A storage is freed only when every saved tensor in it is compressed."""
    kept = {t.storage: t.name for t in saved if reasons[t.name] and t.dtype is not None}
    for tensor in saved:
        if not reasons[tensor.name] and tensor.storage in kept:
            reasons[tensor.name] = f"shares its memory with {kept[tensor.storage]}, which is kept"


def _aliases(saved: tuple[SavedTensor, ...], reasons: Mapping[str, str], masks: MaskAnalysis) -> dict[str, str]:
    """Tensors that lie in a storage which another saved tensor is the whole of: its blob serves them, too."""
    fits = [t for t in saved if not reasons[t.name] and t.name in masks.values and t.dtype in SOURCE_DTYPES]
    fits = [t for t in fits if not t.dynamic]
    whole: dict[tuple[int, torch.dtype | None], str] = {}
    for tensor in fits:
        if tensor.nbytes == tensor.storage_nbytes:
            whole.setdefault((tensor.storage, tensor.dtype), tensor.name)
    hosts = {t.name: whole.get((t.storage, t.dtype), t.name) for t in fits}
    return {name: host for name, host in hosts.items() if host != name and name not in masks.hosts.values()}


def _steps(tensor: SavedTensor) -> tuple[int, ...]:
    """The strides, but for dimensions of one element, of which they say nothing: those of what lies in rows."""
    steps: list[int] = []
    in_rows = 1
    for size, step in reversed(list(zip(tensor.shape, tensor.stride, strict=True))):
        steps.append(in_rows if size == 1 else step)
        in_rows = steps[-1] * size
    return tuple(reversed(steps))


def _order(stride: tuple[int, ...], channels_last: bool) -> tuple[int, ...]:
    """The dimensions from the slowest to the fastest."""
    if channels_last and len(stride) == 4:
        return (0, 2, 3, 1)
    return tuple(sorted(range(len(stride)), key=lambda d: (-stride[d], d)))
