"""Choose matrix products, convolutions and attention to be computed again in backward (``recompute="full"``).

A saved result of such an operator can be dropped where what it was computed from is saved, too, or comes from the
caller: nothing is computed again from something that is itself computed again by a product, so that backward never
rebuilds more than one layer. Candidates are taken by seconds per byte, cheapest first, with floating-point operations
for seconds; last those without which more bytes could be dropped.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from gact_fx.codec.code import Code
from gact_fx.graphs.aot import GraphPair, JointGraph
from gact_fx.graphs.edit import ancestors
from gact_fx.graphs.operators import OpOverload
from gact_fx.graphs.step_memory import pair_memory
from gact_fx.options import allowed_nbytes
from gact_fx.passes.encodings import Quantize
from gact_fx.passes.graph_analysis import GraphAnalysis
from gact_fx.passes.is_cheap import is_cheap
from gact_fx.passes.pipeline import Context
from gact_fx.passes.stored_memory import stored_memory
from gact_fx.plan import TensorPlan

# Width at which the bytes of a cut are compared with the budget.
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

    With ``budget_bytes`` these free what the peak at the usual width is beyond it, and are none where that would raise
    the peak; without, they free what can be freed.
    """
    assert context.try_cut is not None
    pair, analysis = context.try_cut(joint, frozenset())
    budget, is_fused = context.config.budget_bytes, context.config.inner == "inductor"
    peak = usual_peak(pair, analysis, fused=is_fused)
    spare_nbytes = None if budget is None else peak - allowed_nbytes(budget, context.plain.activations)
    chosen: set[str] = set()
    dropped: set[str] = set()
    needed: set[str] = set()
    freed = 0.0
    for candidate in _in_order(_candidates(pair, analysis)):
        if spare_nbytes is not None and freed >= spare_nbytes:
            break
        if candidate.name in needed or candidate.needs & dropped:
            continue
        chosen |= candidate.products
        dropped.add(candidate.name)
        needed |= candidate.needs
        freed += candidate.nbytes
    found = frozenset(chosen)
    # Backward may need more while it computes them again than is held less.
    is_worse = budget is not None and usual_peak(*context.try_cut(joint, found), fused=is_fused) > peak
    return frozenset() if is_worse else found


def _in_order(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    kept = Counter[str]()
    for candidate in candidates:
        kept.update(dict.fromkeys(candidate.needs, candidate.nbytes))
    return sorted(candidates, key=lambda c: (kept[c.name] > c.nbytes, c.flops / c.nbytes, c.name))


def usual_peak(pair: GraphPair, analysis: GraphAnalysis, *, fused: bool) -> int:
    """The most bytes of activations that are live at a time with every code of the usual width."""
    entries = {tensor.key: TensorPlan(tensor.key, Code(USUAL_BITS)) for tensor, _ in analysis.quantized()}
    return stored_memory(pair_memory(pair, fused=fused), analysis, entries).activations


def _candidates(pair: GraphPair, analysis: GraphAnalysis) -> list[_Candidate]:
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
            nbytes = math.ceil(tensor.numel * USUAL_BITS / 8)
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
