"""Choose matrix products, convolutions and attention to be computed again in backward (``recompute="full"``).

A saved result of such an operator can be dropped where what it was computed from is saved, too, or comes from the
caller: nothing is computed again from something that is itself computed again by a product, so that backward never
rebuilds more than one layer. Candidates are taken by seconds per byte, cheapest first, with floating-point operations
for seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.operators import OpOverload
from gact_fx.passes.find_substitutes import bends_without_bound
from gact_fx.passes.mark_recomputation import is_cheap
from gact_fx.records import QUANTIZE, GraphAnalysis

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


def choose_products(pair: GraphPair, analysis: GraphAnalysis, spare_nbytes: float | None) -> frozenset[str]:
    """Names of the nodes to compute again, given the cut with cheap recomputation alone.

    ``spare_nbytes``: bytes, at 4 bits per element, to be freed; None frees what can be.
    """
    chosen: set[str] = set()
    dropped: set[str] = set()
    needed: set[str] = set()
    freed = 0.0
    for candidate in sorted(_candidates(pair, analysis), key=lambda c: (c.flops / c.nbytes, c.name)):
        if spare_nbytes is not None and freed >= spare_nbytes:
            break
        if candidate.name in needed or candidate.needs & dropped:
            continue
        chosen |= candidate.products
        dropped.add(candidate.name)
        needed |= candidate.needs
        freed += candidate.nbytes
    return frozenset(chosen)


def _candidates(pair: GraphPair, analysis: GraphAnalysis) -> list[_Candidate]:
    sources = {value.source: value.name for value in pair.saved_values()}
    slots = {value.name: value for value in pair.saved_values()}
    backward = {node.name: node for node in pair.backward.graph.nodes}
    found = []
    for tensor, how in zip(analysis.saved, analysis.eligibility, strict=True):
        value = slots[tensor.name]
        # Computed again from rounded values, what is exponentiated would no longer fit its statistics.
        if how.encoding != QUANTIZE or (how.instead and bends_without_bound(value.placeholder, backward[how.instead])):
            continue
        region = _region(value.source, sources)
        if region is None:
            continue
        inner, needs = region
        flops = {node.name: _flops(node) for node in inner}
        products = frozenset(name for name, count in flops.items() if count)
        if products and all(flops[node.name] or is_cheap(node) for node in inner):
            nbytes = math.ceil(tensor.numel * USUAL_BITS / 8)
            found.append(_Candidate(tensor.name, nbytes, sum(flops.values()), products, frozenset(needs)))
    return found


def _region(source: fx.Node, saved: dict[fx.Node, str]) -> tuple[list[fx.Node], set[str]] | None:
    """The nodes that compute ``source`` from other saved values and inputs, and the names of those saved values."""
    inner, needs, stack = [source], set(), list(source.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in saved:
            needs.add(saved[node])
        elif node.op != "placeholder" and node not in inner:
            if node.op != "call_function":
                return None
            inner.append(node)
            stack.extend(node.all_input_nodes)
    return inner, needs


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
