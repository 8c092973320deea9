"""Find the decisions that backward takes from saved values, so that they can be stored exactly.

Backward compares saved values (ReLU's ``x <= 0``) and recomputes short chains that end in a comparison (batch norm,
then ReLU). From a quantized value such a decision flips, and a flipped decision is a biased gradient. A decision that
follows from saved values alone is therefore taken in forward, and stored at one bit.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import ancestors
from gact_fx.graphs.operator_table import KNOWN, KNOWN_NAMESPACES
from gact_fx.graphs.operators import HigherOrderOperator, OpOverload
from gact_fx.graphs.sizes import have_same_shape


@dataclass(frozen=True)
class MaskAnalysis:
    """``hosts``: mask node of backward → the saved tensor in whose blob it travels. ``refused``: saved tensor → why
    backward needs it exactly. ``values``: saved tensors of which backward still reads values once the masks are exact.
    ``sole``: the masks that follow from their host alone.
    """

    hosts: dict[str, str]
    refused: dict[str, str]
    values: frozenset[str]
    sole: frozenset[str]


def find_masks(pair: GraphPair, lossy: frozenset[str], attention: Collection[str] = ()) -> MaskAnalysis:
    """Split the uses of the ``lossy`` saved tensors into exact decisions and values.

    A tensor that feeds a decision which cannot be taken in forward is refused, which may make other nodes exact, so the
    walk is repeated until nothing more is refused. Of the nodes named in ``attention`` none is such a decision.
    """
    refused: dict[str, str] = {}
    while True:
        hosts, sole, more = _walk(pair, lossy - refused.keys(), attention)
        if not more:
            return MaskAnalysis(hosts, refused, values_read(pair, frozenset(hosts)), sole)
        refused.update(more)


def derivable_nodes(pair: GraphPair) -> frozenset[fx.Node]:
    """The nodes of backward that forward could compute as well: they depend on saved values alone, and draw nothing."""
    tangents = pair.tangents()
    derivable: set[fx.Node] = set()
    for node in pair.backward.graph.nodes:
        is_saved = node.op == "placeholder" and node.name not in tangents
        is_copyable = node.op == "call_function" and not draws(node)
        if is_saved or (is_copyable and derivable.issuperset(node.all_input_nodes)):
            derivable.add(node)
    return frozenset(derivable)


def _walk(
    pair: GraphPair, lossy: frozenset[str], attention: Collection[str]
) -> tuple[dict[str, str], frozenset[str], dict[str, str]]:
    outputs = [node for node in pair.backward_outputs if isinstance(node, fx.Node)]
    needed = ancestors(outputs)
    placeholders = {placeholder.name: placeholder for placeholder in pair.backward.graph.find_nodes(op="placeholder")}
    sources: dict[fx.Node, frozenset[str]] = {}  # the lossy tensors that a node's value depends on
    derivable = derivable_nodes(pair)
    # Those that are taken in forward, in their order.
    decisions: dict[fx.Node, None] = {}
    refused: dict[str, str] = {}
    for node in pair.backward.graph.nodes:
        if node.op == "placeholder":
            sources[node] = frozenset({node.name}) & lossy
            continue
        if node.op == "output":
            continue
        sources[node] = frozenset().union(*(sources[i] for i in node.all_input_nodes))
        if node in derivable and not _is_boolean(node):
            # What follows from decisions alone, such as how many elements are the largest, is as exact as they are.
            rounded = any(sources[i] for i in node.all_input_nodes if i not in decisions)
            sources[node] = sources[node] if rounded else frozenset()
        if not sources[node] or node not in needed or node.name in attention:
            continue
        if _is_boolean(node) and node in derivable:
            decisions[node] = None
        elif _decides(node):
            refused.update(
                {
                    name: f"backward compares it ({node.target}), and rounding could change the outcome"
                    for name in sources[node]
                }
            )
    if refused:
        return {}, frozenset(), refused
    # Of a chain of boolean operations only the last results need storing, and none that follow from stored ones.
    known: set[fx.Node] = set()
    masks: set[fx.Node] = set()
    for node in decisions:
        if known.issuperset(node.all_input_nodes):
            known.add(node)
        elif any(user not in decisions for user in node.users):
            known.add(node)
            masks.add(node)
    # Nor do those that lead to others alone, by way of numbers: of ``abs(x) < 1`` the sign.
    masks &= ancestors(outputs, masks.__contains__)
    hosts: dict[str, str] = {}
    for node in sorted(masks):
        tensors = [placeholders[name] for name in sources[node]]
        hosts[node.name] = _choose_host(node, tensors, Counter(hosts.values()))
    return hosts, frozenset(node.name for node in masks if len(sources[node]) == 1), {}


def _choose_host(mask: fx.Node, tensors: Sequence[fx.Node], hosted: Mapping[str, int]) -> str:
    """One as large as the mask, and of those one with few masks yet: into the codes of each one can be merged."""
    like = mask.meta["val"]
    return min((not have_same_shape(t.meta["val"], like), hosted[t.name], t.name) for t in tensors)[-1]


def counts(node: fx.Node) -> bool:
    """Whether ``node`` makes integers of floating-point numbers, which rounding these may change."""
    value = node.meta.get("val")
    is_integer = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point and value.dtype is not torch.bool
    inputs = [i.meta.get("val") for i in node.all_input_nodes]
    return is_integer and any(isinstance(i, torch.Tensor) and i.dtype.is_floating_point for i in inputs)


def is_known(node: fx.Node) -> bool:
    """Whether ``node`` calls an operator of PyTorch's own, or one of these by way of a higher-order operator, or one of
    the few others whose code was read.
    """
    if isinstance(node.target, HigherOrderOperator):
        inner = [x for x in node.args if isinstance(x, OpOverload)]
        return bool(inner) and all(operator.namespace in KNOWN_NAMESPACES for operator in inner)
    if not isinstance(node.target, OpOverload) or node.target.namespace in KNOWN_NAMESPACES:
        return True
    return str(node.target) in KNOWN


def _decides(node: fx.Node) -> bool:
    values = node.meta.get("val")
    values = values if isinstance(values, (tuple, list)) else (values,)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    # A multi-output operator is judged by its getitems.
    return len(tensors) == 1 and not tensors[0].dtype.is_floating_point and not tensors[0].dtype.is_complex


def _is_boolean(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def draws(node: fx.Node) -> bool:
    """Whether ``node`` takes numbers, or seeds, from a generator: drawn again they would be others."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def values_read(pair: GraphPair, masks: frozenset[str]) -> frozenset[str]:
    """Placeholders that backward's outputs need when the nodes in ``masks`` are given."""
    return frozenset(node.name for node in nodes_read(pair, masks) if node.op == "placeholder")


def nodes_read(pair: GraphPair, given: frozenset[str]) -> set[fx.Node]:
    """The nodes that backward's outputs need, none of them behind the nodes in ``given``."""
    outputs = [node for node in pair.backward_outputs if isinstance(node, fx.Node)]
    return ancestors(outputs, lambda node: node.name in given)
