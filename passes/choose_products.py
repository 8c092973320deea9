"""Choose matrix products, convolutions and attention to be computed again in backward (``recompute="full"``).

A saved result of such an operator can be dropped where what it was computed from is saved, too, or comes from the
caller: nothing is computed again from something that is itself computed again by a product, so that backward never
rebuilds more than one layer. Candidates are taken by seconds per byte, cheapest first, with floating-point operations
for seconds; last those without which more bytes could be dropped.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from gact_fx.codec.code import Code
from gact_fx.graphs.aot import GraphPair, JointGraph
from gact_fx.graphs.edit import ancestors
from gact_fx.graphs.live_memory import lifetimes
from gact_fx.graphs.operators import OpOverload
from gact_fx.graphs.step_memory import StepMemory, pair_memory
from gact_fx.options import allowed_nbytes
from gact_fx.passes.encodings import Quantize
from gact_fx.passes.graph_analysis import GraphAnalysis
from gact_fx.passes.is_cheap import is_cheap
from gact_fx.passes.pipeline import Context
from gact_fx.passes.stored_memory import stored_memory
from gact_fx.plan import TensorPlan

# Cuts that are tried until the peak is no higher.
TRIES = 4
# Width of codes under ``budget_bytes``, where the plan's widths are not known yet.
USUAL_BITS = 4


@dataclass(frozen=True)
class _Candidate:
    """A saved value, the products that compute it, and the saved values that these need."""

    name: str
    nbytes: int
    flops: int
    products: frozenset[str]
    needs: frozenset[str]


def choose_products(joint: JointGraph, context: Context) -> frozenset[str]:
    """Names of the nodes to compute again, given the cut with cheap recomputation alone.

    With ``budget_bytes`` these free what the peak is beyond it; without, they free what can be freed. Those that would
    raise the peak are left out: of activations, if there is a budget for these, or else of all that a step allocates.
    """
    assert context.try_cut is not None
    budget, fused = context.config.budget_bytes, context.config.inner == "inductor"
    bits = context.config.eager_bits if budget is None else USUAL_BITS
    pair, analysis = context.try_cut(joint, frozenset())
    usual = usual_memory(pair, analysis, bits, fused=fused)
    spare = math.inf if budget is None else usual.activations - allowed_nbytes(budget, context.plain.activations)
    chosen = _enough(_candidates(pair, analysis, bits), spare)
    limit = usual.peak if budget is None else usual.activations
    for _ in range(TRIES):
        products = frozenset(name for candidate in chosen for name in candidate.products)
        pair, analysis = context.try_cut(joint, products)
        levels = usual_memory(pair, analysis, bits, fused=fused).levels(gradients=budget is None)
        above = {when for when, nbytes in enumerate(levels, -len(levels)) if nbytes > limit}
        if not above:
            return products
        # Backward needs more there while it computes these again than is held less.
        live = _recomputed_at(above, pair, products, fused=fused)
        chosen = [candidate for candidate in chosen if not candidate.products & live]
        if not chosen:
            break
    return frozenset()


def _enough(candidates: Sequence[_Candidate], nbytes: float) -> list[_Candidate]:
    """The cheapest that together free ``nbytes``, or all, where none needs what another one drops."""
    chosen: list[_Candidate] = []
    dropped: set[str] = set()
    needed: set[str] = set()
    for candidate in _in_order(candidates):
        if sum(c.nbytes for c in chosen) >= nbytes:
            break
        if candidate.name not in needed and not candidate.needs & dropped:
            chosen.append(candidate)
            dropped.add(candidate.name)
            needed |= candidate.needs
    return chosen


def _recomputed_at(calls: Collection[int], pair: GraphPair, products: Collection[str], *, fused: bool) -> set[str]:
    """Those of ``products`` from which values are live in backward at one of ``calls``, counted from its end on.

    The values are forward's own, computed again; derivatives do not count.
    """
    graph = pair.backward.graph
    found = lifetimes(graph, graph.find_nodes(op="placeholder"), fused=fused)
    length = len(found.calls)
    live = [s.node for s in found.spans if any(s.start <= when + length <= s.end for when in calls)]
    again = {node.name for node in pair.forward.graph.nodes}
    return {node.name for node in ancestors(live, lambda node: node.name not in again) if node.name in products}


def _in_order(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    kept = Counter[str]()
    for candidate in candidates:
        kept.update(dict.fromkeys(candidate.needs, candidate.nbytes))
    return sorted(candidates, key=lambda c: (kept[c.name] > c.nbytes, c.flops / c.nbytes, c.name))


def usual_memory(pair: GraphPair, analysis: GraphAnalysis, bits: int, *, fused: bool) -> StepMemory:
    """What a step of this pair alone has in memory with every code of ``bits``."""
    entries = {tensor.key: TensorPlan(tensor.key, Code(bits)) for tensor, _ in analysis.quantized()}
    return StepMemory.of([stored_memory(pair_memory(pair, fused=fused), analysis, entries)], [1])


def _candidates(pair: GraphPair, analysis: GraphAnalysis, bits: int) -> list[_Candidate]:
    sources = {value.source: value.name for value in pair.saved_values()}
    values = {value.name: value for value in pair.saved_values()}
    found = []
    for tensor, how in analysis.pairs():
        value = values[tensor.name]
        # Computed again from rounded values it would no longer fit its statistics, or come upon poles.
        if not isinstance(how, Quantize) or (how.bends and (how.statistics or not how.is_tame)):
            continue
        # What computes it from other saved values and inputs, these included.
        region = ancestors(value.source.all_input_nodes, sources.__contains__)
        needs = frozenset(sources[node] for node in region if node in sources)
        inner = [value.source, *(node for node in region if node not in sources and node.op != "placeholder")]
        if any(node.op != "call_function" for node in inner):
            continue
        flops = {node: _flops(node) for node in inner}
        products = frozenset(node.name for node in inner if flops[node])
        if products and all(flops[node] or is_cheap(node) for node in inner):
            nbytes = math.ceil(tensor.numel * bits / 8)
            found.append(_Candidate(tensor.name, nbytes, sum(flops.values()), products, needs))
    return found


def _flops(node: fx.Node) -> int:
    """Floating-point operations of a matrix product, convolution or attention; 0 for anything else."""
    if not isinstance(node.target, OpOverload):
        return 0
    values = [i.meta.get("val") for i in node.all_input_nodes]
    tensor: Any = next((value for value in values if isinstance(value, torch.Tensor)), None)
    if tensor is None or is_cheap(node):
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda i: i.meta["val"])
    with tensor.fake_mode, FlopCounterMode(display=False) as counter:
        node.target(*args, **kwargs)
    return int(counter.get_total_flops())
