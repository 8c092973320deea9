"""Have backward make attention's probabilities again, from the scores, for the gradient of the softmax.

With dropout, or in another precision, the probabilities that are multiplied with the gradient are not those that the
softmax's gradient reads. Both are as large as the scores, and would be made of these in one kernel. Made again behind
that product, from the scores and what the softmax has of each row, the second ones are never there: of the three such
tensors two remain.

On the CPU, Inductor stores exponentials that have two readers. So every reader gets its own.
"""

from collections.abc import Collection, Mapping

import torch
from torch import fx

from gact_fx.graphs.edit import add_call, ancestors, dependents, numel
from gact_fx.graphs.operator_table import REORDERS
from gact_fx.graphs.operators import packet_of
from gact_fx.passes.is_cheap import is_cheap

aten = torch.ops.aten
_BEHIND = torch.ops.gact_fx.behind.default
_RESHAPED = REORDERS | {aten.expand}


def exponentiate_again(
    scores: fx.Node, first: fx.Node, factor: fx.Node, second: fx.Node, slopes: Collection[fx.Node]
) -> None:
    """Edit the graph in place: what follows from ``second`` reads what is made of ``scores`` behind ``first``.

    ``first`` is the product with ``factor``, which is made of the scores as well; ``slopes`` depend on a tangent.
    """
    graph = scores.graph
    made = {node for node in made_of(scores, slopes) if numel(node) == numel(scores)}
    late = dependents(graph, lambda node: node is second)
    readers = sorted({user for node in made for user in node.users if user in late})
    sources = sorted({source for user in readers for source in user.all_input_nodes if source in made})
    same = _unshaped(factor)
    if scores in sources or scores not in ancestors(sources, lambda node: node is scores or node in same):
        return  # made of the factor, which is there until then
    of_rows = dependents(graph, lambda node: node is scores) - dependents(graph, lambda node: node is first) - made
    if any(numel(node) >= numel(scores) for node in of_rows & ancestors(sources, lambda node: node is scores)):
        return  # as large as the scores, and not cheap
    copies: dict[fx.Node, fx.Node] = {}
    for user in readers:
        for source in [source for source in sources if source in user.all_input_nodes]:
            between = ancestors([source], lambda node: node is scores) & made - {scores}
            numbers = {number for node in between for number in node.all_input_nodes if number in of_rows}
            with graph.inserting_before(user):
                for number in sorted(numbers - copies.keys()):
                    copies[number] = add_call(graph, _BEHIND, (number, first), f"{number.name}_late")
                user.replace_input_with(source, _made_again(source, between, copies))
    for node in sorted(node for node in made if packet_of(node) is aten.exp):
        for user in list(node.users)[1:]:
            with graph.inserting_before(user):
                user.replace_input_with(node, graph.node_copy(node))


def _made_again(source: fx.Node, between: set[fx.Node], numbers: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """A copy of ``source``, and of all ``between`` the scores and it, made with these ``numbers`` of rows."""
    copies = dict(numbers)
    for node in sorted(between):
        copies[node] = source.graph.node_copy(node, lambda i: copies.get(i, i))
    return copies[source]


def made_of(start: fx.Node, slopes: Collection[fx.Node]) -> list[fx.Node]:
    """``start``, and what cheap operators make of it without a tangent, in the order of their graph."""
    found = {start: None}
    for node in start.graph.nodes:
        if node not in slopes and is_cheap(node) and not found.keys().isdisjoint(node.all_input_nodes):
            found[node] = None
    return list(found)


def _unshaped(factor: fx.Node) -> set[fx.Node]:
    """``factor``, and what it is only another shape of."""
    found = {factor}
    while packet_of(factor) in _RESHAPED:
        factor = factor.all_input_nodes[0]
        found.add(factor)
    return found
