"""Have backward multiply a gradient with attention's probabilities before it makes the gradient of these.

The gradient of attention's output is multiplied twice: with the probabilities, for the value, and with the value, for
the probabilities. What is made of either is as large as the scores are, and Inductor would make both in one kernel.
In turn there are two or three such tensors at a time instead of four or five. For the second product's sake dropout's
numbers are drawn again, from the same seed, and probabilities are made again (`exponentiate_again`).
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import add_call, ancestors, behind, dependents
from gact_fx.graphs.live_memory import nbytes
from gact_fx.graphs.operator_table import CASTS, REORDERS
from gact_fx.passes.exponentiate_again import exponentiate_again, made_of
from gact_fx.passes.pipeline import Context

aten = torch.ops.aten
_BEHIND = torch.ops.gact_fx.behind.default
_RESHAPED = REORDERS | {aten.expand} | CASTS
# So many times larger than the gradient is a product that is worth a copy of the gradient.
_LARGER = 2


def multiply_in_turn(pair: GraphPair, context: Context) -> None:
    """Edit backward in place: the second product reads the gradient `behind` the first."""
    if context.config.inner != "inductor":
        return
    graph, tangents = pair.backward.graph, pair.tangents()
    depends = dependents(graph, lambda node: node.name in tangents)
    products = [node for node in graph.find_nodes(op="call_function", target=aten.bmm.default) if node in depends]
    for first in products:
        factors = {factor: behind(factor, _RESHAPED) for factor in first.all_input_nodes}
        probabilities = [factor for factor, source in factors.items() if source.name in context.attention]
        gradients = [source for source in factors.values() if source in depends]
        for second in products if probabilities else ():
            shared = [i for i in second.all_input_nodes if behind(i, _RESHAPED) in gradients]
            if second is first or len(shared) != 1 or nbytes(second) <= _LARGER * nbytes(shared[0]):
                continue
            if first not in ancestors([second]) and second not in ancestors([first]):
                _wait(graph, second, shared[0], first)
                before = ancestors(probabilities)
                _draw_again(second, first, before, depends)
                scores = [node for node in before if node.target is aten.bmm.default and node.name in context.attention]
                if len(scores) == len(probabilities) == 1:
                    exponentiate_again(scores[0], first, probabilities[0], second, depends)


def _wait(graph: fx.Graph, product: fx.Node, factor: fx.Node, first: fx.Node) -> None:
    """Have ``product``, which reads ``factor``, made behind ``first``."""
    for node in sorted(ancestors([first], lambda node: node < product)):
        if node > product:
            product.prepend(node)
    with graph.inserting_before(product):
        late = add_call(graph, _BEHIND, (factor, first), f"{factor.name}_late")
    product.replace_input_with(factor, late)


def _draw_again(product: fx.Node, first: fx.Node, before: Collection[fx.Node], depends: Collection[fx.Node]) -> None:
    """Have what follows from ``product`` read another draw of the numbers in ``before``, which ``first`` multiplies."""
    graph = product.graph
    late = dependents(graph, lambda node: node is product)
    for numbers in sorted(node for node in before if node.target is torch.ops.prims.inductor_random.default):
        made = made_of(numbers, depends)
        readers = sorted({user for node in made for user in node.users if user in late})
        if not readers:
            continue
        seed: Any = numbers.args[1]
        with graph.inserting_before(readers[0]):
            copies = {seed: add_call(graph, _BEHIND, (seed, first), f"{numbers.name}_seed")}
            for node in made:
                copies[node] = graph.node_copy(node, partial(_of, copies))
        for user in readers:
            for source in user.all_input_nodes:
                user.replace_input_with(source, _of(copies, source))


def _of(copies: Mapping[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    return copies.get(node, node)
