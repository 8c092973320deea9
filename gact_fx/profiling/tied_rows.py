"""Whether the rows of a batch depend on each other, so that a few of them do not stand for all."""

from typing import Any

import torch
from torch import fx

from gact_fx.graphs.edit import numel, tensors_of
from gact_fx.graphs.operator_table import SCATTERS, TAKES_POSITIONS, TAKES_WRAPPING
from gact_fx.graphs.operators import packet_of
from gact_fx.graphs.sizes import RowSymbol, hint

# Elements of which a mean over rows is made, at the least, where rows depend on it. (ResNet-50: a batch norm's of 16
# made predictions two times too low. Of 98, two rows', these were 0.6 to 1.2 times those of eight rows, of 147 1.2 to
# 1.7 times: rows differ more than that.)
ENOUGH_IN_STATISTICS = 96


def are_tied(graph: fx.Graph, symbol: RowSymbol, share: float) -> bool:
    """Whether rows of forward's ``graph`` depend on others: by statistics of which a ``share`` of the rows has too few
    elements (batch norm), in pairs (a contrastive loss, attention where the rows are positions), or by positions (a
    graph's edges).
    """
    statistics: set[fx.Node] = set()
    depends: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        tensors = tensors_of(node)
        of_rows, others = ([x for x in tensors if symbol.is_in(x) == is_of] for is_of in (True, False))
        found = [hint(x.numel()) for x in of_rows] or [numel(i) for i in inputs if i in depends]
        elements = max(found, default=0)
        is_small = any(share * elements < ENOUGH_IN_STATISTICS * hint(x.numel()) for x in others if elements)
        if of_rows and (is_small or not statistics.isdisjoint(inputs)):
            return True
        if any(sum(symbol.is_in(size) for size in x.shape) > 1 for x in of_rows) or _meets_others(node, symbol):
            return True
        if of_rows:
            depends.add(node)
        elif is_small or not statistics.isdisjoint(inputs):
            statistics.add(node)
    return False


def _meets_others(node: fx.Node, symbol: RowSymbol) -> bool:
    """Whether an operator reads other rows by their positions, or attends to them."""
    source: Any = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], fx.Node) else None
    if not isinstance(source, torch.Tensor) or not source.dim() or node.op != "call_function":
        return False
    if "scaled_dot_product" in str(node.target):
        return symbol.is_in(source.shape[-2])
    if node.target in TAKES_WRAPPING:
        positions: Any = node.args[1]
        return any(symbol.is_in(source.shape[d]) for d, index in enumerate(positions) if index is not None)
    if node.target in TAKES_POSITIONS or packet_of(node) in SCATTERS:
        where = TAKES_POSITIONS.get(node.target, (1, 2))[0]
        dimension: Any = 0 if where is None else node.args[where]
        return symbol.is_in(source.shape[dimension])
    return False
