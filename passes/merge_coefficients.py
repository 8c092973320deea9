"""Merge what backward does to a gradient, element by element, into one coefficient by which the gradient is multiplied.

Backward is linear in the tangents. A region of pointwise operators with one tangent in and one out is ``out = t * J``,
with J the region evaluated at t = 1: masks, ``where``, quotients and ``xxx_backward(t, x)`` become one tensor, which
depends on saved values alone, and in which backward is linear. It can be stored in their place. Apart, the pieces of
an ELU's derivative are ``exp(x)`` and a mask, and the codes of exp(x) are as coarse as its largest element, which the
mask stops.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import add_call, add_full, ancestors, dependents, is_float, numel, tensors_of
from gact_fx.graphs.linearity import is_linear, is_pointwise
from gact_fx.graphs.sizes import have_same_shape, hint
from gact_fx.passes.find_bends import bends, dependents_within
from gact_fx.passes.pipeline import Context

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default
# Member of a region → the node by which its tangent comes in.
Regions = dict[fx.Node, fx.Node]


def merge_coefficients(pair: GraphPair, context: Context) -> None:
    """Edit ``pair.backward`` in place."""
    graph = pair.backward.graph
    tangents = pair.tangents()
    depends = dependents(graph, lambda node: node.name in tangents)
    varies = varying(pair)
    regions = _find_regions(list(graph.nodes), depends, varies)
    merged: dict[fx.Node, fx.Node] = {}
    for end in [node for node in graph.nodes if node in regions]:
        inner = _between(regions[end], end, regions)
        factors = {i for node in inner for i in node.all_input_nodes if i not in depends}
        is_large = max(map(numel, factors), default=0) >= context.config.min_elements
        if is_large and _leaves(end, regions) and _is_worth_it(factors, inner, varies):
            # The region may begin at the end of one that is merged already, and then reads the product.
            merged[end] = _merge(merged.get(regions[end], regions[end]), end, inner)
            depends.add(merged[end])


def varying(pair: GraphPair) -> frozenset[fx.Node]:
    """The floating-point nodes of backward that follow, by floating-point nodes, from saved activations alone."""
    tangents = pair.tangents()
    static = {v.placeholder for v in pair.saved_values() if v.source.name in pair.static_inputs}
    found: set[fx.Node] = set()
    others: set[fx.Node] = set()
    for node in pair.backward.graph.nodes:
        if node.name in tangents or not others.isdisjoint(node.all_input_nodes):
            others.add(node)
        elif any(x.is_floating_point() for x in tensors_of(node)):
            is_saved = node.op == "placeholder" and node not in static
            if is_saved or not found.isdisjoint(node.all_input_nodes):
                found.add(node)
    return frozenset(found)


def _find_regions(nodes: Sequence[fx.Node], depends: Collection[fx.Node], varies: Collection[fx.Node]) -> Regions:
    """Every region as large as it can be with nothing inside that others read."""
    candidates = [node for node in nodes if node in depends and is_pointwise(node) and is_float(node)]
    inputs = {node: [i for i in node.all_input_nodes if i in depends] for node in candidates}
    candidates = [node for node in candidates if all(map(is_float, inputs[node])) and is_linear(node, inputs[node])]
    roots: set[fx.Node] = set()
    while True:
        regions: Regions = {}
        numels: dict[fx.Node, int] = {}
        for node in candidates:
            found = {i if i in roots else regions.get(i, i) for i in inputs[node]}
            size = _coefficient_numel(node, found, numels, depends, varies)
            if len(found) == 1 and size is not None:
                regions[node] = found.pop()
                numels[node] = size
        torn = {n for n in regions if n not in roots and _leaves(n, regions) and _goes_on(n, regions)}
        if not torn:
            return regions
        # What others read as well is where another region begins.
        roots |= torn


def _coefficient_numel(
    node: fx.Node,
    roots: Collection[fx.Node],
    numels: Mapping[fx.Node, int],
    depends: Collection[fx.Node],
    varies: Collection[fx.Node],
) -> int | None:
    """Elements of the coefficient up to ``node``; None where it would be larger than what varies in it."""
    factors = [i for i in node.all_input_nodes if i not in depends and isinstance(i.meta.get("val"), torch.Tensor)]
    inner = [numels[i] for i in node.all_input_nodes if i in numels and i not in roots]
    shapes = [_shape(i) for i in factors]
    largest = max([*inner, *(numel(i) for i in factors if i in varies)], default=None)
    size = max([*inner, torch.broadcast_shapes(*shapes).numel() if shapes else 1])
    return None if largest is not None and size > largest else size


def _leaves(node: fx.Node, regions: Regions) -> bool:
    """Whether anything outside of the region reads ``node``."""
    return any(regions.get(user) is not regions[node] for user in node.users)


def _goes_on(node: fx.Node, regions: Regions) -> bool:
    return any(regions.get(user) is regions[node] for user in node.users)


def _between(root: fx.Node, end: fx.Node, regions: Regions) -> list[fx.Node]:
    """The nodes of the region that ``end`` follows from, in order, ``end`` included."""
    found, stack = {end}, [end]
    while stack:
        new = [i for i in stack.pop().all_input_nodes if i not in found and regions.get(i) is root]
        found.update(new)
        stack.extend(new)
    return sorted(found)


def _is_worth_it(factors: Collection[fx.Node], inner: Sequence[fx.Node], varies: AbstractSet[fx.Node]) -> bool:
    """Whether a coefficient of these ``factors`` has values in it, and bends in them or takes several decisions.

    A single decision beside values costs a bit, or nothing where their codes can tell it.
    """
    if varies.isdisjoint(factors) or (len(inner) == 1 and inner[0].target is aten.mul.Tensor):
        return False
    if any(node.meta["val"].dtype is torch.float16 for node in inner):
        # Of small tangents factors may be multiplied that overflow by themselves.
        return False
    decisions = [node for node in factors if node not in varies and _is_boolean(node)]
    before = ancestors(factors) & varies
    sources = [node for node in before if node.op == "placeholder"]
    within = before | set(inner)
    return len(decisions) > 1 or any(bends(dependents_within(source, within), [source]) for source in sources)


def _merge(root: fx.Node, end: fx.Node, inner: Sequence[fx.Node]) -> fx.Node:
    """The node that backward reads for ``end`` from then on."""
    graph, value = end.graph, end.meta["val"]
    with graph.inserting_before(end):
        copies = {root: add_full(graph, [1] * root.meta["val"].dim(), 1.0, root.meta["val"])}
        for node in inner:
            copies[node] = _copy(node, lambda i: copies.get(i, i))
        merged = add_call(graph, aten.mul.Tensor, (root, copies[end]), f"{end.name}_merged")
        if merged.meta["val"].dtype != value.dtype:
            merged = add_call(graph, convert, (merged, value.dtype), f"{end.name}_cast")
    if not have_same_shape(merged.meta["val"], value) or _strides(merged) != _strides(end):
        return end
    end.replace_all_uses_with(merged)
    return merged


def _copy(node: fx.Node, replaced: Callable[[fx.Node], fx.Node]) -> fx.Node:
    args, kwargs = fx.map_arg((node.args, node.kwargs), replaced)
    return add_call(node.graph, node.target, args, f"{node.name}_coefficient", **kwargs)


def _is_boolean(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def _shape(node: fx.Node) -> list[int]:
    return [hint(size) for size in node.meta["val"].shape]


def _strides(node: fx.Node) -> list[int]:
    return [hint(step) for step in node.meta["val"].stride()]
