"""Decide how every saved tensor is stored: its encoding, with a reason where it could not be smaller."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from gact_fx.codec.layout import SOURCE_DTYPES
from gact_fx.config import Config
from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.compilers import channels_last_nodes
from gact_fx.graphs.edit import ancestors, is_float, numel
from gact_fx.graphs.operator_table import FUSED_ATTENTION
from gact_fx.graphs.operators import name_of
from gact_fx.graphs.sizes import SizeBuilder, hint, is_same
from gact_fx.passes.bound_indices import bits_of, packable_range
from gact_fx.passes.encodings import Alias, Copy, Drop, Encoding, Keep, Mask, Pack, Quantize
from gact_fx.passes.find_bends import (
    ORDER,
    Coefficients,
    bends,
    dependents_within,
    is_read_through,
    is_tame,
    meeting,
    poles,
    straight_bases,
)
from gact_fx.passes.find_copies import find_copies
from gact_fx.passes.find_masks import MaskAnalysis, derivable_nodes, find_masks, nodes_read
from gact_fx.passes.find_readers import Readers, find_readers
from gact_fx.passes.find_refusals import STATISTIC, find_refusals
from gact_fx.passes.find_standardizations import find_standardizations
from gact_fx.passes.graph_analysis import GraphAnalysis, memory_order, steps_of_rows
from gact_fx.passes.merge_masks import find_merge
from gact_fx.passes.pipeline import Context
from gact_fx.records import SavedTensor

_TOO_LARGE = "the decisions that backward takes by it would need as much memory as the tensor"
_STUCK = "backward may have a pole in it, and compares it with other tensors, which would all have to be exact"
# Width from which on what a recurrent layer computes again bends little.
RECURRENT_BITS = 6
# Coefficients beyond so many times a tensor's elements are not stored in its place.
MOST_COEFFICIENTS = 4


def decide_eligibility(pair: GraphPair, context: Context) -> GraphAnalysis:
    """The encoding of every saved tensor."""
    saved = context.saved
    refused: dict[str, str] = {}
    while True:
        decisions = _Decisions(pair, context, refused)
        encodings = [decisions.encoding(tensor) for tensor in saved]
        stuck = {how.name: _STUCK for how in encodings if isinstance(how, Quantize) and _is_stuck(how)}
        if not stuck:
            break
        refused.update(stuck)
    shared = {how.of for how in encodings if isinstance(how, Alias)}
    encodings = _without_shared_statistics(_standardized(pair, encodings, shared, decisions.read))
    # Views of the same codes would read NaN.
    return GraphAnalysis(saved, tuple(how if how.name in shared else decisions.merging(how) for how in encodings))


class _Decisions:
    """What the analyses say of all saved tensors together; `encoding` says what follows for one of them."""

    def __init__(self, pair: GraphPair, context: Context, refused: Mapping[str, str]) -> None:
        config, saved, self._attention = context.config, context.saved, context.attention
        self._values = {value.name: value for value in pair.saved_values()}
        ranges = {t.name: packable_range(t, self._values[t.name], config.min_elements) for t in saved}
        self._ranges = {name: found for name, found in ranges.items() if found is not None}
        self._nodes = {node.name: node for node in pair.backward.graph.nodes}
        self._sizes = SizeBuilder(pair.backward.graph)
        refused = find_refusals(pair, saved, min_elements=config.min_elements) | dict(refused)
        self._reasons = {name: "" if name in self._ranges else reason for name, reason in refused.items()}
        masks, self._readers = self._settle(pair, saved, config)
        self._derivable = derivable_nodes(pair)
        self.aliases = self._aliases(saved, masks)
        # What leads to nothing but what is stored itself is not stored.
        read = nodes_read(pair, frozenset(masks.hosts))
        self.read = frozenset(node.name for node in read if node.op == "placeholder")
        hosts = {mask: host for mask, host in masks.hosts.items() if self._nodes[mask] in read}
        self._masks = replace(masks, hosts=hosts, sole=masks.sole & hosts.keys())
        self._mask_numel = _mask_numel(self._masks, self._nodes)
        self._sole = self._find_sole({t.name for t in saved if t.owner not in ("nobody", "output")})
        statistics = (t for t in saved if self._reasons[t.name] == STATISTIC and t.name in self.read)
        computed = (t for t in statistics if self._values[t.name].source.op == "call_function")
        self._statistics = {tensor.name: tensor.storage_nbytes for tensor in computed}
        # Of several tensors that lead to one coefficient the first pays for the statistics.
        self._paid: set[str] = set()
        # Inputs and results lie in memory as they were traced, and so does what fused attention is computed from: its
        # kernels read elements of a head as if they lay side by side, wherever they are.
        fixed = {t.name for t in saved if t.boundary is not None} | set(self.aliases.values())
        attention = [n for n in self._nodes.values() if name_of(n.target).startswith("_scaled_dot_product")]
        fixed |= {node.name for node in ancestors(attention)}
        self._reordered = channels_last_nodes(pair.forward, config.inner) - fixed

    def _settle(self, pair: GraphPair, saved: tuple[SavedTensor, ...], config: Config) -> tuple[MaskAnalysis, Readers]:
        """Refuse tensors until what is left can be compressed together."""
        while True:
            self._copied = find_copies(pair, saved, self._reasons)
            _refuse_shared(saved, self._reasons, self._copied)
            exact = {name for name, reason in self._reasons.items() if reason} | self._ranges.keys()
            lossy = frozenset(t.name for t in saved if t.name not in exact and t.dtype is not torch.bool)
            masks = find_masks(pair, lossy, self._attention)
            readers = find_readers(pair, lossy & masks.values, masks.hosts, self._attention)
            nonlinear = {
                name: f"backward is not linear in this tensor ({reader})" for name, reader in readers.nonlinear.items()
            }
            unmeasured = _unmeasured(readers.unknown, config, self._aliases(saved, masks))
            numel = _mask_numel(masks, self._nodes)
            # A comparison of all pairs can be far larger than what is compared.
            too_large = {t.name: _TOO_LARGE for t in saved if numel.get(t.name, 0) / 8 > t.storage_nbytes / 2}
            refused = {**masks.refused, **unmeasured, **nonlinear, **too_large}
            if not refused.keys() - {name for name, reason in self._reasons.items() if reason}:
                return masks, readers
            self._reasons.update(refused)

    def _aliases(self, saved: tuple[SavedTensor, ...], masks: MaskAnalysis) -> dict[str, str]:
        """Tensors that lie in a storage which another saved tensor is the whole of: its blob serves them, too."""
        fits = [t for t in saved if not self._reasons[t.name] and t.name in masks.values and t.dtype in SOURCE_DTYPES]
        fits = [t for t in fits if not t.dynamic or self._is_clear(t)]
        # Of several the first.
        whole = {(t.storage, t.dtype): t.name for t in reversed(fits) if t.nbytes == t.storage_nbytes}
        hosts = {t.name: whole.get((t.storage, t.dtype), t.name) for t in fits}
        return {name: host for name, host in hosts.items() if host != name and name not in masks.hosts.values()}

    def _is_clear(self, tensor: SavedTensor) -> bool:
        """Whether backward can tell where a tensor of varying sizes lies, and it is a whole storage for all of them."""
        value = self._values[tensor.name].source.meta["val"]
        is_whole = is_same(value.numel() * value.element_size(), value.untyped_storage().nbytes())
        can_tell = self._sizes.can_build([*value.shape, *value.stride(), value.storage_offset()])
        return can_tell and (is_whole or tensor.nbytes < tensor.storage_nbytes)

    def _find_sole(self, held: AbstractSet[str]) -> frozenset[str]:
        """The masks that backward can take from their host again: it has all else that they follow from.

        ``held`` are the saved tensors that somebody else holds.
        """
        there = self.read | held
        found = {mask: ancestors([self._nodes[mask]]) for mask in self._masks.sole}
        inputs = {mask: {node.name for node in nodes if node.op == "placeholder"} for mask, nodes in found.items()}
        return frozenset(mask for mask, names in inputs.items() if names <= there | {self._masks.hosts[mask]})

    def encoding(self, tensor: SavedTensor) -> Encoding:
        """How ``tensor`` is stored; asked for all tensors in their order."""
        name, host = tensor.name, self.aliases.get(tensor.name)
        own = tuple(mask for mask, of in self._masks.hosts.items() if of == name)
        if tensor.owner in ("nobody", "output") and not (own or name in self.read):
            return Drop(name, "backward does not read it")
        if name in self._ranges:
            found = self._ranges[name]
            modulus = found.limit if found.wraps else None
            order = memory_order(tensor.stride)
            return Pack(name, "integers of a known range, packed exactly", order, bits_of(found), modulus)
        if self._reasons[name]:
            if name in self._copied:
                return Copy(name, self._reasons[name], memory_order(tensor.stride))
            return Keep(name, self._reasons[name])
        if host is not None:
            return Alias(name, f"the same memory as {host}", host)
        order = memory_order(steps_of_rows(tensor), channels_last=name in self._reordered)
        if tensor.dtype is torch.bool:
            return Mask(name, "boolean, stored exactly", order)
        mask_numel = self._mask_numel.get(name, 0)
        if name not in self.read:
            return Mask(name, "backward only compares it", order, own, mask_numel)
        min_bits = RECURRENT_BITS if name in self._readers.recurrent else 1
        return Quantize(
            name, "", order, own, mask_numel, min_bits=min_bits, is_curved=name in self._readers.curved,
            exact_allowed=self._sole.issuperset(own), **self._bends(tensor, self._nodes[name], own),
        )  # fmt: skip

    def _bends(self, tensor: SavedTensor, stored: fx.Node, masks: Sequence[str]) -> dict[str, Any]:
        """Whether backward bends in a tensor, of which ``stored`` has the values, and what else may then be stored."""
        unknown = self._readers.unknown.get(tensor.name)
        if unknown is not None:
            return {"bends": True, "unknown": unknown}
        # What is stored for another tensor's sake has no error of this one.
        given = self._masks.hosts.keys()
        # What lies in the same memory is rounded with it.
        shared = [self._nodes[alias] for alias, host in self.aliases.items() if host == tensor.name]
        starts = [stored, *shared]
        chain = set[fx.Node]().union(*(dependents_within(start, self._derivable, given) for start in starts))
        read = tuple(mask for mask in masks if not chain.issuperset(self._nodes[mask].users))
        needed = [n for n in self._unread(meeting(chain, self._derivable), chain) if n not in self._paid]
        self._paid.update(needed)
        statistics = tuple((name, self._statistics[name]) for name in needed)
        # Attention that is computed again has a width of its own.
        attention = {node for node in chain if node.target in FUSED_ATTENTION.values() or node.name in self._attention}
        if len(read) == len(masks) and not bends(chain, starts, attention):
            return {"statistics": statistics}
        ends = straight_bases(chain, stored, self._derivable, self._masks.hosts)
        total = sum(map(numel, ends))
        dtype = (ends[0] if ends and is_float(ends[0]) else stored).meta["val"].dtype
        fits = all(node not in shared and is_float(node) and node.meta["val"].dtype == dtype for node in ends)
        fits = fits and all(self._sizes.can_build(list(node.meta["val"].shape)) for node in ends)
        names = tuple(node.name for node in ends) if fits and total <= MOST_COEFFICIENTS * tensor.numel else ()
        mask_numel = sum(numel(self._nodes[mask]) for mask in read)
        retaken = set(masks) - set(read)
        within = {node.name for node in dependents_within(stored, self._derivable)}
        retakes = bool(retaken) and retaken <= within & self._sole
        tame = is_tame(chain, starts)
        has_poles = not tame and bool(poles(chain, starts, ORDER))
        # Of poles among usual numbers a sample says little, and coefficients of no more elements are sound.
        is_inferior = has_poles and bool(names) and total <= tensor.numel
        return {
            "bends": True,
            "is_tame": tame,
            "has_poles": has_poles,
            "values_allowed": tame or not (is_inferior or self._has_poles_with_others(starts, chain)),
            "coefficients": Coefficients(names, dtype, total, read, mask_numel, self._unread(ends, chain), retakes),
            "statistics": statistics,
        }

    def _unread(self, given: Sequence[fx.Node], chain: AbstractSet[fx.Node]) -> tuple[str, ...]:
        """The statistics that nobody would read if the ``given`` nodes of ``chain`` were stored."""
        found = (self._nodes[name] for name in self._statistics)
        return tuple(node.name for node in found if is_read_through(given, node, chain, self._derivable))

    def _has_poles_with_others(self, starts: Collection[fx.Node], chain: AbstractSet[fx.Node]) -> bool:
        """Whether the ``chain`` of a tensor has a pole that another rounded tensor leads to as well.

        What either does alone is measured, but ``(a + b) ** 0.5`` may be defined for all that is made of ``a``, and of
        ``b``, and not for both together.
        """
        own, given = poles(chain, starts), self._masks.hosts.keys()
        names = (n for n in self._masks.values if own and not self._reasons.get(n))
        others = (self._nodes[name] for name in names if self._nodes[name] not in starts)
        return any(own & poles(dependents_within(other, self._derivable, given), [other]) for other in others)

    def merging(self, how: Encoding) -> Encoding:
        """``how`` with the mask that its codes could tell."""
        if not isinstance(how, Quantize) or how.bends:
            return how
        value = self._values[how.name]
        return replace(how, merges=find_merge(value, how.masks, how.standardization, self._nodes))


def _unmeasured(unknown: Mapping[str, str], config: Config, aliases: Mapping[str, str]) -> dict[str, str]:
    """Of the tensors that ``unknown`` operators read, those that nobody will try codes of, and why."""
    why = ""
    if config.unknown_operators == "exact":
        why = " (Config.unknown_operators)"
    elif not config.adaptive:
        why = ", and adaptive=False does not measure it"
    return {
        name: f"{operator} reads it, which gact_fx does not know{why or ', and others lie in the same memory'}"
        for name, operator in unknown.items()
        if why or name in {*aliases, *aliases.values()}
    }


def _is_stuck(how: Quantize) -> bool:
    """Whether every code may lead to a pole, and nothing sound can take its place that could be measured."""
    is_sound = how.values_allowed and "coefficients" in how.other_ways()
    return how.bends and not how.is_tame and not how.exact_allowed and not is_sound


def _standardized(pair: GraphPair, encodings: list[Encoding], shared: set[str], read: frozenset[str]) -> list[Encoding]:
    """``encodings``, and what `find_standardizations` finds for quantized tensors whose blob serves no other."""
    alone = [how for how in encodings if isinstance(how, Quantize) and how.name not in shared]
    masks = {how.name: how.masks for how in alone}
    exact = frozenset(how.name for how in encodings if isinstance(how, Keep)) & read
    found = find_standardizations(pair, masks, exact)
    standardized = list(encodings)
    for index, how in enumerate(encodings):
        if isinstance(how, Quantize) and how.name in found:
            reason = "; ".join(filter(None, (how.reason, "standardised as by batch norm")))
            standardized[index] = replace(how, standardization=found[how.name], reason=reason)
    return standardized


def _without_shared_statistics(encodings: list[Encoding]) -> list[Encoding]:
    """``encodings``, of which none frees a statistic by which a tensor is standardised."""
    found = [how for how in encodings if isinstance(how, Quantize) and how.standardization is not None]
    needed = {name for how in found if (by := how.standardization) is not None for name in (by.mean, by.rstd)}
    return [how.keeping(needed) if isinstance(how, Quantize) else how for how in encodings]


def _mask_numel(masks: MaskAnalysis, nodes: Mapping[str, fx.Node]) -> dict[str, int]:
    """Elements of the masks that a tensor carries."""
    total: Counter[str] = Counter()
    for mask, host in masks.hosts.items():
        total[host] += hint(nodes[mask].meta["val"].numel())
    return total


def _refuse_shared(saved: tuple[SavedTensor, ...], reasons: dict[str, str], copied: frozenset[str]) -> None:
    """A storage is freed only when every saved tensor in it is compressed or ``copied``."""
    kept = {t.storage: t.name for t in saved if reasons[t.name] and t.dtype is not None and t.name not in copied}
    blocked = (t for t in saved if not reasons[t.name] and t.storage in kept)
    reasons.update({t.name: f"shares its memory with {kept[t.storage]}, which is kept" for t in blocked})
