"""What operators of which nothing is known do to their gradients: whether they are linear in them, found by trying."""

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from gact_fx.graphs.differentiable import has_derivative
from gact_fx.graphs.edit import dependents
from gact_fx.graphs.interpreter import GraphInterpreter
from gact_fx.graphs.replay import Replay
from gact_fx.graphs.trees import tree_leaves
from gact_fx.passes.find_bends import dependents_within
from gact_fx.passes.find_masks import derivable_nodes, is_known
from gact_fx.profiling.gradients import in_double
from gact_fx.profiling.tape import Step

# By what two halves of a gradient are multiplied. What clips it may do so far above what a loss that is a mean gives.
_FACTORS = ((1.0, 1.0), (2.0, -0.5), (2.0**20, 2.0**20))
_HALF_FACTORS = _FACTORS[:2]
# Of the largest element; products in TensorFloat-32 are no better.
_TOLERANCE = 2e-3


def find_refusals(step: Step, names: Collection[str]) -> dict[str, str]:
    """Of the tensors in ``names``, why backward is not linear behind them, '' where nothing speaks against it."""
    operators = _UnknownOperators(step)
    return {name: operators.refusal(node) for node, name in step.readings.items() if name in names}


class _UnknownOperators:
    """Those that read the saved tensors of one recorded step."""

    def __init__(self, step: Step) -> None:
        self._replay = Replay(step.backward, step.arguments)
        self._interpreter = GraphInterpreter(step.backward)
        self._nodes = {node.name: node for node in step.backward.graph.nodes}
        self._derivable = derivable_nodes(step.pair)
        tangents = step.pair.tangents()
        self._tangible = dependents(step.backward.graph, lambda node: node.name in tangents)
        self._is_linear = cache(self._try)

    def refusal(self, reading: str) -> str:
        """Which operator that reads the backward node ``reading``, or what follows from it, is not linear."""
        followers = dependents_within(self._nodes[reading], self._derivable)
        readers = {user for node in followers for user in node.users if not is_known(user)}
        culprit = next((node for node in sorted(readers) if not self._is_linear(node)), None)
        return "" if culprit is None else f"{culprit.target} is not linear in the gradient"

    def _try(self, node: fx.Node) -> bool:
        """Whether ``node`` gives of sums and multiples of its recorded gradients the same sums and multiples."""
        recorded = self._replay.evaluate({i.name for i in node.all_input_nodes})
        values = {i: recorded[i.name] for i in node.all_input_nodes}
        gradients = {i: x for i, x in values.items() if i in self._tangible and has_derivative(x)}
        left = {i: x * _coins(x) for i, x in gradients.items()}

        def run(a: float, b: float) -> list[Any]:
            given = {i: a * left[i] + b * (x - left[i]) for i, x in gradients.items()}
            args, kwargs = fx.map_arg((node.args, node.kwargs), {**values, **given}.__getitem__)
            return tree_leaves(self._interpreter.call_function(node.target, args, kwargs))

        if not gradients:
            return True
        is_half = any(torch.finfo(x.dtype).max < 1e30 for x in gradients.values())
        try:
            halves = run(1, 0), run(0, 1)
            return all(_is_combination(run(*by), halves, by) for by in (_HALF_FACTORS if is_half else _FACTORS))
        except Exception:
            return False


def _coins(like: torch.Tensor) -> torch.Tensor:
    """Zeros and ones."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, like.shape, generator=generator).to(like)


def _is_combination(found: Sequence[Any], halves: tuple[Sequence[Any], Sequence[Any]], by: tuple[float, float]) -> bool:
    for x, *parts in zip(found, *halves, strict=True):
        if not has_derivative(x):
            if isinstance(x, torch.Tensor) and not all(torch.equal(x, part) for part in parts):
                return False
            continue
        left, right = (factor * in_double(part) for factor, part in zip(by, parts, strict=True))
        error, size = (in_double(x) - left - right).abs(), left.abs() + right.abs()
        tolerance = max(_TOLERANCE, 8 * torch.finfo(x.dtype).eps)
        if x.numel() and not bool(error.max() <= tolerance * size.max()):
            return False
    return True
