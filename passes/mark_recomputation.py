"""Mark, in the joint graph, what backward may compute again and what must be saved, before the partitioner cuts it.

Recomputed are cheap operators only: pointwise ones, views, casts, indexing, and random numbers from saved seeds. What
is computed from parameters and unchanging buffers alone, and constants, are always recomputed; and by cheap operators,
what is computed from the batch, which the caller holds, such as autocast's copy of it. Where NumPy or another process
may write to the batch's memory, what is made of it is saved as well. Everything else is saved
where backward needs it: matrix products, for their time (`find_attention` and `find_batched_products` have exceptions);
reductions and fused normalisations, whose results are small and would be biased if they came from rounded values; and
every choice of an index, which rounding could flip. Under ``budget_bytes``, which limits the peak, ``"auto"`` saves the
sums of a residual stream, too (`find_joins`).
What only widens a saved tensor's numbers, or scales them then, is computed again: their codes would take as many bytes,
and which of them the partitioner saves would differ between graphs of one model (a size that varies is enough).
Of regions that the user checkpoints, only the 1 / deviations of normalisations are saved, a number a row: computed
again they would be unbounded in the regions' inputs, so that these could not be rounded.

The marks are those of PyTorch's selective checkpointing (``CheckpointPolicy``), which its min-cut partitioner obeys.
"""

from collections.abc import Collection

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gact_fx.graphs.aot import JointGraph
from gact_fx.graphs.edit import elements_nbytes, is_float
from gact_fx.graphs.operator_table import CASTS, REORDERS, SCATTERS
from gact_fx.graphs.operators import packet_of, returns_alias
from gact_fx.graphs.sizes import hint
from gact_fx.passes.find_batched_products import find_batched_products
from gact_fx.passes.find_joins import find_joins
from gact_fx.passes.find_masks import draws
from gact_fx.passes.is_cheap import is_cheap
from gact_fx.passes.pipeline import Context

aten = torch.ops.aten

# Of one tensor and a number, they have the tensor's elements times it.
_MULTIPLES = REORDERS | {aten.mul, aten.div, aten.neg}
# Elements that share a statistic, at least.
_FEW = 8
# What has more bytes than so many times those that it is made of is not saved for these may be written to.
_LARGER = 8


def mark_recomputation(joint: JointGraph, context: Context) -> bool:
    """Set ``node.meta["recompute"]`` in place, and return whether whatever is not marked may be recomputed.

    With ``Config.recompute="off"`` only what comes from parameters and buffers alone is marked. ``context.products``
    names expensive nodes that are to be computed again anyway.
    """
    recompute, products = context.config.recompute, context.products
    from_parameters, held, widened = set(joint.parameters()), set(joint.held_inputs()), set[fx.Node]()
    foreign = set(joint.foreign_inputs())
    forward = joint.before_tangents()
    if recompute != "off":
        products = products | {node.name for node in find_batched_products(forward) if "recompute" not in node.meta}
    for node in forward:
        if node.op != "call_function":
            continue
        # Constants have no inputs at all.
        if from_parameters.issuperset(node.all_input_nodes) and not draws(node):
            from_parameters.add(node)
            held.add(node)
            _mark(node, CheckpointPolicy.MUST_RECOMPUTE)
        elif node.name in products or node.name in context.attention:
            _mark(node, CheckpointPolicy.MUST_RECOMPUTE)
        elif recompute != "off" and _is_wanted(node):
            _mark(node, CheckpointPolicy.MUST_SAVE)
        elif recompute != "off" and "recompute" not in node.meta:
            if held.issuperset(node.all_input_nodes):
                held.add(node)
            elif not foreign.isdisjoint(node.all_input_nodes):
                if returns_alias(node.target):
                    foreign.add(node)
                elif elements_nbytes(node) <= _LARGER * sum(map(elements_nbytes, node.all_input_nodes)):
                    _mark(node, CheckpointPolicy.MUST_SAVE)
                continue
            elif _only_widens(node, widened):
                widened.add(node)
            else:
                continue
            _mark(node, CheckpointPolicy.MUST_RECOMPUTE)
    if recompute == "auto" and context.config.budget_bytes is not None:
        for node in find_joins(forward):
            _mark(node, CheckpointPolicy.MUST_SAVE)
    return recompute != "off"


def _is_wanted(node: fx.Node) -> bool:
    """Whether ``node`` is to be saved; what the user's own checkpointing has decided stays as it is."""
    if "recompute" not in node.meta:
        return not is_cheap(node) or _is_scattered_exp(node)
    return node.meta["recompute"] is CheckpointPolicy.PREFER_RECOMPUTE and _is_reciprocal_deviation(node)


def _only_widens(node: fx.Node, widened: Collection[fx.Node]) -> bool:
    """Whether ``node`` has the numbers of one narrower tensor, or multiples of them, as those ``widened`` do."""
    if len(node.all_input_nodes) != 1 or not is_float(node):
        return False
    (source,) = node.all_input_nodes
    if packet_of(node) in CASTS:
        return is_float(source) and source.meta["val"].dtype.itemsize < node.meta["val"].dtype.itemsize
    return source in widened and packet_of(node) in _MULTIPLES and node.args[0] is source


def _is_scattered_exp(node: fx.Node) -> bool:
    """Whether ``node`` is the exponential in a softmax over the edges of a graph, whose sum is a scatter.

    It has few elements an edge, and is linear in backward; what it is computed from would have to be kept exact.
    """
    views = [user for user in node.users if user.target in (aten.view.default, aten.expand.default)]
    users = [*node.users, *(user for view in views for user in view.users)]
    return node.target is aten.exp.default and any(packet_of(user) in SCATTERS for user in users)


def _is_reciprocal_deviation(node: fx.Node) -> bool:
    """Whether ``node`` is 1 / deviation of rows or channels: of what has far more elements."""
    if node.target is not aten.rsqrt.default:
        return False
    source, size = node, _numel(node)
    # From the reduction's result to its input are epsilon, and views.
    while source.all_input_nodes and _numel(source) == size:
        source = max(source.all_input_nodes, key=_numel)
    return _numel(source) >= _FEW * size


def _numel(node: fx.Node) -> int:
    """Elements of a tensor, or of the largest of several, on the traced batch."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return max((hint(v.numel()) for v in values if isinstance(v, torch.Tensor)), default=0)


def _mark(node: fx.Node, policy: CheckpointPolicy) -> None:
    node.meta["recompute"] = policy
    node.meta.setdefault("ac_graph_id", 0)
