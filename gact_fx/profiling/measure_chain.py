"""Measure what codes of one tensor do to the gradient by way of a chain to backward's coefficients.

The chain is evaluated on both codes next to every element, the true ones, and what comes out is weighed by the chance
of each: the variance of the coefficients, their bias, and whether anything that can be reached is not finite. Of large
tensors a sample of groups is evaluated, and compared with what first order says of the same groups.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import getitem
from typing import Any

import torch
from torch import fx

from gact_fx.codec.code import Code
from gact_fx.graphs.linearity import is_pointwise
from gact_fx.graphs.operator_table import MOVES
from gact_fx.graphs.operators import packet_of
from gact_fx.graphs.sizes import hint
from gact_fx.profiling.added_by_width import MEASURED, NOT_FINITE, Added, all_widths, mean, measure_widths
from gact_fx.profiling.chains import Chain, Values
from gact_fx.profiling.elements import Elements
from gact_fx.profiling.neighbours import ROUNDINGS, draw, farthest

# Blocks, as large as the largest group, that stand for all of a tensor that has more than twice as many.
BLOCK, SAMPLED_BLOCKS = 1024, 32
# Elements that are looked at together.
_CHUNK = 128 * BLOCK
# A sum over a sample is known to belong together where its square is so many times what independent parts would make.
COHERENT = 3.0
SlopesOf = Mapping[fx.Node, Sequence[torch.Tensor]]


def sample(numel: int, device: torch.device) -> torch.Tensor | None:
    """Flat positions of whole groups that stand for all, None where all do."""
    if numel // BLOCK <= 2 * SAMPLED_BLOCKS:
        return None
    blocks = torch.linspace(0, numel // BLOCK - 1, SAMPLED_BLOCKS).long()
    return (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten().to(device)


def measure_sample(
    chain: Chain,
    values: torch.Tensor,
    slopes: SlopesOf,
    own: Sequence[torch.Tensor],
    elements: Mapping[fx.Node, Elements],
    widths: Sequence[int] = MEASURED,
    *,
    is_tame: bool = False,
) -> dict[Code, Added]:
    """What codes do to chosen ``elements``, whose ``slopes`` and ``own`` ones these are, and whether all is finite.

    ``is_tame``: it is known to be.
    """
    if not chain.ends:
        nothing = dict.fromkeys(widths, Added(0.0, 0.0, 0.0, 0.0))
        return {code: added for rounding in ROUNDINGS for code, added in all_widths(nothing, rounding).items()}
    positions = elements[chain.start].positions
    x = values.reshape(-1)[positions]
    origins = [elements[node].origins for node in chain.ends]
    weights = _Weights([slopes[node] for node in chain.ends], origins, len(x))
    own_weights = _Weights([own])
    exact = chain.evaluate_at(x, elements)

    def measure(rounding: str, finite: set[int], bits: int) -> Added:
        # What fewer bits can make of an element reaches further.
        is_finite = is_tame or any(fewer < bits for fewer in finite)
        if not (is_finite or _is_finite(chain, values, elements, rounding, bits)):
            return NOT_FINITE
        finite.add(bits)
        low, high, chances = ROUNDINGS[rounding](x, bits)
        moved = [_moved(chain.evaluate_at(side, elements), exact) for side in (low, high)]
        first = _first_order(own_weights, x, (low, high), chances)
        return _added([(weights, [[m[node] for node in chain.ends] for m in moved], chances)], first, COHERENT)

    found: dict[Code, Added] = {}
    for rounding in ROUNDINGS:
        found |= all_widths(measure_widths(partial(measure, rounding, set()), widths), rounding)
    return found


def _is_finite(
    chain: Chain, values: torch.Tensor, elements: Mapping[fx.Node, Elements], rounding: str, bits: int
) -> bool:
    """Whether whatever codes can make of any element leads to finite coefficients."""

    flat = values.reshape(-1)
    sides = (side.reshape(values.shape) for side in farthest(flat, bits, rounding))
    if any(at.taken is not None for at in elements.values()):
        return all(bool(end.isfinite().all()) for side in sides for _, end in chain.results(side))
    for part in _parts(flat):
        positions = torch.arange(*part.indices(len(flat)), device=flat.device)
        some = {node: replace(at, positions=positions) for node, at in elements.items()}
        for side in farthest(flat[positions], bits, rounding):
            if not all(bool(end.isfinite().all()) for end in chain.evaluate_at(side, some).values()):
                return False
    return True


def measure_whole(
    chain: Chain,
    nodes: set[fx.Node],
    values: torch.Tensor,
    slopes: SlopesOf,
    own: Sequence[torch.Tensor],
    widths: Sequence[int] = MEASURED,
) -> dict[Code, Added]:
    """What codes do to all elements; ``nodes`` are those that follow from them."""
    exact = chain.evaluate(values)
    by_shape: dict[torch.Size, list[fx.Node]] = {}
    for node, value in exact.items():
        by_shape.setdefault(value.shape, []).append(node)
    weights = {shape: _Weights([slopes[node] for node in ends]) for shape, ends in by_shape.items()}
    own_weights = _Weights([own])

    def measure(rounding: str, bits: int) -> Added:
        low, high, chances = ROUNDINGS[rounding](values, bits)
        first = _first_order(own_weights, values, (low, high), chances)
        carried = [_carried(chance, chain, nodes) for chance in chances]

        def added(found: Iterable[Values], chances: Callable[[fx.Node], Sequence[torch.Tensor | None]]) -> Added:
            moved = [_moved(each, exact) for each in found]
            parts = [
                (weights[shape], [[m[node] for node in ends] for m in moved], chances(ends[0]))
                for shape, ends in by_shape.items()
            ]
            return _added(parts, first, 1.0)

        if all(node in shares for shares in carried for node in exact):
            return added(map(chain.evaluate, (low, high)), lambda node: [shares[node] for shares in carried])
        # Elements mix in some coefficient: two draws stand for all, one after the other, and the mean tells the bias.
        draws = (draw((low, high, chances), rounding, number) for number in range(2))
        drawn = mean([added([chain.evaluate(side)], lambda node: [None]) for side in draws])
        certain = torch.ones((), device=values.device)
        average = _average(chain, nodes, values, (low, high), carried)
        bias = added([average], lambda node: [certain.expand(exact[node].shape)])
        return replace(bias, variance=max(drawn.variance - bias.own_bias, 0.0))

    found: dict[Code, Added] = {}
    for rounding in ROUNDINGS:
        found |= all_widths(measure_widths(partial(measure, rounding), widths), rounding)
    return found


class _Weights:
    """How much the gradient minds what happens to coefficients whose elements belong together, by probe.

    ``origins``: by coefficient, which of ``count`` elements its own follow from, where these are not the same ones.
    """

    def __init__(
        self,
        slopes: Sequence[Sequence[torch.Tensor]],
        origins: Sequence[torch.Tensor | None] | None = None,
        count: int = 0,
    ) -> None:
        # By probe and coefficient.
        self._slopes = [[slope.detach().reshape(-1) for slope in found] for found in zip(*slopes, strict=False)]
        self._origins = origins or [None] * len(slopes)
        self._count = count

    def changes(self, moved: Sequence[torch.Tensor], part: slice) -> list[torch.Tensor]:
        """By probe, the change of the gradient by element of a part, where coefficients are so far ``moved``."""
        return [
            reduce(torch.add, (self._change(*each, part) for each in zip(slopes, moved, self._origins, strict=True)))
            for slopes in self._slopes
        ]

    def _change(
        self, slope: torch.Tensor, moved: torch.Tensor, origins: torch.Tensor | None, part: slice
    ) -> torch.Tensor:
        if origins is None:
            return slope[part].float() * moved[part]
        return moved.new_zeros(self._count).index_add_(0, origins, slope.float() * moved)[part]


def _first_order(
    own: _Weights, x: torch.Tensor, sides: Sequence[torch.Tensor], chances: Sequence[torch.Tensor]
) -> float:
    """The variance that codes of ``x`` add by its own derivatives."""
    found = 0.0
    for side, chance in zip(sides, chances, strict=True):
        moved = (side - x).reshape(-1).float()
        for part in _parts(moved):
            changes = own.changes([moved], part)
            squares = [float((chance.reshape(-1)[part] * change.square()).sum()) for change in changes]
            found += sum(squares) / max(len(squares), 1)
    return found


# Coefficients of one shape, how far codes move each of them, and the chances of these codes by element (None: there is
# one code, which was drawn).
Part = tuple[_Weights, Sequence[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]]


def _added(parts: Sequence[Part], first: float, coherent: float) -> Added:
    """What codes add; biases whose squared sum is less than ``coherent`` times that of independent ones are such."""
    square, own_bias, sums = 0.0, 0.0, dict[int, float]()
    for weights, sides, chances in parts:
        for part in _parts(sides[0][0] if chances[0] is None else chances[0].reshape(-1)):
            shares: list[Any] = [1.0 if chance is None else chance.reshape(-1)[part].float() for chance in chances]
            changes = list(zip(*(weights.changes(side, part) for side in sides), strict=True))
            for probe, both in enumerate(changes):
                weighed = [share * change for share, change in zip(shares, both, strict=True)]
                average = reduce(torch.add, weighed)
                squares = reduce(torch.add, (weight * change for weight, change in zip(weighed, both, strict=True)))
                square += float(squares.sum(dtype=torch.float64)) / len(changes)
                if chances[0] is not None:
                    own_bias += float(average.square().sum(dtype=torch.float64)) / len(changes)
                    sums[probe] = sums.get(probe, 0.0) + float(average.sum(dtype=torch.float64))
    # The sum over elements of one probe's bias is a single number, whose square varies much from probe to probe; the
    # elements' own biases are the least of it that is known well, unless they cancel.
    together = sum(x * x for x in sums.values()) / max(len(sums), 1)
    more = together - own_bias if together > coherent * own_bias else 0.0
    # A coefficient that is not finite makes all of them so, whatever its slope.
    is_finite = all(map(math.isfinite, (square, own_bias, together)))
    return Added(max(square - own_bias, 0.0), own_bias, more, first) if is_finite else NOT_FINITE


def _parts(x: torch.Tensor) -> Iterator[slice]:
    """All elements, so many at a time that little is in memory at once."""
    return (slice(first, first + _CHUNK) for first in range(0, len(x), _CHUNK))


def _moved(values: dict[fx.Node, torch.Tensor], exact: Mapping[fx.Node, torch.Tensor]) -> dict[fx.Node, torch.Tensor]:
    """How far every coefficient is from where it is exact; ``values`` are used up."""
    return {node: values.pop(node).reshape(-1).float() - exact[node].reshape(-1).float() for node in list(values)}


def _average(
    chain: Chain,
    nodes: set[fx.Node],
    values: torch.Tensor,
    sides: Sequence[torch.Tensor],
    chances: Sequence[Mapping[fx.Node, torch.Tensor]],
) -> Values:
    """What the ends are in the mean over codes, as if what mixes elements, and all behind it, were linear.

    ``chances`` are those of the ``sides``, by node in front of what mixes.
    """
    inside, ends = chances[0].keys(), set(chain.ends)
    last = [n for n in inside if n in ends or any(user in nodes and user not in inside for user in n.users)]
    front = chain.to(nodes, last)
    exact = front.evaluate(values)
    averages = {node: value.float() for node, value in exact.items()}
    for side, shares in zip(sides, chances, strict=True):
        for node, value in front.evaluate(side).items():
            averages[node] = averages[node] + shares[node] * (value.float() - exact[node].float())
    return chain.evaluate(values, {node: average.to(exact[node].dtype) for node, average in averages.items()})


def _carried(x: torch.Tensor, chain: Chain, nodes: set[fx.Node]) -> dict[fx.Node, torch.Tensor]:
    """A number for every element that ``chain`` starts from, where these lie in ``nodes`` in front of what mixes."""
    found: dict[fx.Node, Any] = {chain.start: x}
    for each in sorted(nodes):
        inputs = [i for i in each.all_input_nodes if i in found]
        if each is chain.start or not inputs:
            continue
        value = each.meta["val"]
        is_one = isinstance(value, torch.Tensor) and is_pointwise(each)
        if is_one and found[inputs[0]].shape == torch.Size(map(hint, value.shape)):
            found[each] = found[inputs[0]]
        elif (packet_of(each) in MOVES or each.target is getitem) and len(each.all_input_nodes) == 1:
            args, kwargs = fx.map_arg((each.args, each.kwargs), found.__getitem__)
            found[each] = chain.interpreter.call_function(each.target, args, kwargs)
    return found
