"""Measure what rounding a tensor adds to the gradient where backward bends in it: at backward's coefficients.

Backward is linear in its coefficients, the nodes that depend on saved values alone and meet a tangent. What codes of a
tensor do to a coefficient is found by evaluating the chain between them on both codes next to every element, the true
ones, and weighing them by the chance of each: the variance of the coefficient, its bias, and whether anything that can
be reached is not finite. Times the coefficient's squared sensitivity that is what the gradient gets.
"""

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from operator import getitem
from typing import Any

import torch
from torch import fx

from gact_fx.codec.arithmetic import dequantize, quantize
from gact_fx.codec.code import WIDTHS, Code, step_variance
from gact_fx.graphs.edit import is_float
from gact_fx.graphs.interpreter import GraphInterpreter
from gact_fx.graphs.linearity import is_pointwise
from gact_fx.graphs.operators import packet_of
from gact_fx.graphs.replay import Replay
from gact_fx.graphs.sizes import hint
from gact_fx.passes.find_bends import MOVES, dependents_within
from gact_fx.passes.find_masks import derivable_nodes
from gact_fx.profiling.rounding_meter import REFERENCE, RoundingMeter
from gact_fx.profiling.tape import Step
from gact_fx.records import Sensitivity

# Widths at which chains are evaluated; between them logarithms are interpolated.
MEASURED = (2, 4, 8)
GROUP_SIZE = 256
Values = Mapping[fx.Node, torch.Tensor]
SlopesOf = Mapping[fx.Node, Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Added:
    """What codes add to the gradient, in units of squared gradient; infinite where a value would not be finite."""

    variance: float
    squared_bias: float

    @property
    def total(self) -> float:
        return self.variance + self.squared_bias


def at_coefficients(first: Sensitivity, added: Mapping[Code, Added]) -> Sensitivity:
    """``first``, which was measured at the tensor itself, with what codes add by their effect on coefficients.

    That is known for groups of 256 elements, and goes for others by how ``first`` varies with them.
    """
    variances, biases = {}, {}
    for code, variance in first.variances.items():
        finest = Code(WIDTHS[-1], code.rounding, GROUP_SIZE)
        like = replace(code, group_size=GROUP_SIZE)
        of = added.get(like)
        if of is None:
            # Of bfloat16, as of the finest codes.
            of, like = added[finest], finest
        base = first.variances[like]
        scale = variance / base if 0 < base < math.inf and variance < math.inf else 1.0
        variances[code], biases[code] = of.total * scale, of.squared_bias * scale
    known = [bits for bits in (REFERENCE.bits, WIDTHS[-1]) if variances[replace(REFERENCE, bits=bits)] < math.inf]
    value = variances[replace(REFERENCE, bits=known[0])] / step_variance(known[0]) if known else math.inf
    return Sensitivity(value, variances, {}, biases)


@dataclass(frozen=True)
class Bent:
    """What was measured of a tensor in which backward bends: what its codes add, by what they are of, and the meter of
    its coefficients, where these may be stored.
    """

    added: dict[str, dict[Code, Added]]
    coefficients: RoundingMeter | None

    def result(self, first: Sensitivity, group_sizes: Sequence[int]) -> Sensitivity:
        """All of it; ``first`` was measured at the tensor itself."""
        found = {name: at_coefficients(first, added) for name, added in self.added.items()}
        others = {name: sensitivity for name, sensitivity in found.items() if name != "values"}
        if self.coefficients is not None:
            others["coefficients"] = self.coefficients.result(group_sizes)
        return replace(found["values"], others=others)


class CoefficientMeter:
    """The coefficients of one recorded step, and the chains that lead to them from tensors in which backward bends."""

    def __init__(self, step: Step) -> None:
        bent = {how.name: how for _, how in step.analysis.quantized() if how.bends}
        masks = {mask for how in step.analysis.encodings for mask in getattr(how, "masks", ())}
        nodes = {node.name: node for node in step.backward.graph.nodes}
        self._derivable = derivable_nodes(step.pair)
        self._replay = Replay(step.backward, step.arguments)
        interpreter = GraphInterpreter(step.backward, differentiable=True)
        self._differentiable = Replay(
            step.backward,
            step.arguments,
            lambda node, args, kwargs: interpreter.call_function(node.target, args, kwargs),
        )
        self._how = {nodes[name]: bent[tensor] for name, tensor in step.readings.items() if tensor in bent}
        # By what is stored: the nodes that follow from rounded values.
        self._chains: dict[fx.Node, dict[str, set[fx.Node]]] = {}
        for reading, how in self._how.items():
            self._chains[reading] = {"values": dependents_within(reading, self._derivable, masks)}
            if "bare" in how.other_ways():
                assert how.coefficients is not None
                retaken = set(how.masks) - set(how.coefficients.masks)
                self._chains[reading]["bare"] = dependents_within(reading, self._derivable, masks - retaken)
        self.of = {reading: self._ends(chains["values"]) for reading, chains in self._chains.items()}

    def measure(self, reading: fx.Node, values: torch.Tensor, slopes: SlopesOf) -> Bent:
        """What codes of every width add, stochastic and dithered, in groups of 256.

        ``values`` are those that ``reading`` has, ``slopes`` the derivatives of the gradient with respect to
        `of[reading]`, one per probe.
        """
        slopes = {node: slopes[node] for node in self.of[reading] if node in slopes}
        added = {stored: self._added(reading, values, slopes, chain) for stored, chain in self._chains[reading].items()}
        return Bent(added, self._meter(reading, values, slopes))

    def _ends(self, chain: set[fx.Node]) -> list[fx.Node]:
        return [n for n in sorted(chain) if is_float(n) and any(user not in self._derivable for user in n.users)]

    def _added(
        self, reading: fx.Node, values: torch.Tensor, slopes: SlopesOf, chain: set[fx.Node]
    ) -> dict[Code, Added]:
        outside = {i.name for node in chain - {reading} for i in node.all_input_nodes if i not in chain}
        given = self._replay.evaluate(outside)

        def evaluate(x: torch.Tensor) -> Values:
            found = self._replay.evaluate({node.name for node in slopes}, {**given, reading.name: x})
            return {node: found[node.name] for node in slopes}

        exact = evaluate(values)
        by_shape: dict[torch.Size, list[fx.Node]] = {}
        for node, value in exact.items():
            by_shape.setdefault(value.shape, []).append(node)
        weights = [_Weights(nodes, slopes) for nodes in by_shape.values()]
        found: dict[Code, Added] = {}
        for rounding, neighbours in (("stochastic", _codes_beside), ("dither", _ends_of_dither)):
            measured = {}
            for bits in MEASURED:
                low, high, chances = neighbours(values.detach(), bits)
                shares = [{n: _carried(c, reading, n, chain) for n in slopes} for c in chances]
                ends: list[torch.Tensor] = [low, high]
                if any(share is None for share in shares[0].values()):
                    # Elements mix in some coefficient: two draws stand for all, each of even chance.
                    ends = [_drawn(low, high, chances[1], rounding, seed) for seed in range(2)]
                    shares = [dict.fromkeys(slopes) for _ in ends]
                moved = [{n: value - exact[n] for n, value in evaluate(x).items()} for x in ends]
                measured[bits] = _added(moved, shares, weights)
            for bits in WIDTHS:
                found[Code(bits, rounding, GROUP_SIZE)] = _between(measured, bits)
        return found

    def _meter(self, reading: fx.Node, values: torch.Tensor, slopes: SlopesOf) -> RoundingMeter | None:
        """What codes of the coefficients themselves would add."""
        how = self._how[reading]
        if "coefficients" not in how.other_ways():
            return None
        assert how.coefficients is not None
        nodes = {node.name: node for node in self._chains[reading]["values"]}
        # The tensor itself has another name where it is decompressed.
        parts = [nodes.get(name, reading) for name in how.coefficients.nodes]
        exact = self._replay.evaluate({node.name for node in parts}, {reading.name: values})
        meter = RoundingMeter(torch.cat([exact[node.name].reshape(-1) for node in parts]))
        # What is stored may be what coefficients follow from, by affine operators.
        with torch.enable_grad():
            stored = {name: value.detach().requires_grad_() for name, value in exact.items()}
            ends = self._differentiable.evaluate({node.name for node in slopes}, {reading.name: values, **stored})
        inputs = [stored[node.name] for node in parts]
        for probe in range(max((len(found) for found in slopes.values()), default=0)):
            given = {ends[node.name]: found[probe] for node, found in slopes.items() if ends[node.name].requires_grad}
            of = torch.autograd.grad(
                list(given), inputs, list(given.values()), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            meter.add(torch.cat([slope.reshape(-1) for slope in of]))
        return meter


def _codes_beside(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Of every element the codes below and above it, and the chances that stochastic rounding takes them."""
    groups, restore = _grouped(x)
    code = Code(bits, "stochastic", GROUP_SIZE)
    index = torch.arange(len(groups), device=x.device)
    codes, minimum, step = quantize(groups, code, index)
    drawn = dequantize(codes, minimum, step, x.dtype, code, index)
    other = torch.where(drawn > groups, codes - 1, codes + 1).clamp(0, 2**bits - 1)
    other = dequantize(other, minimum, step, x.dtype, code, index)
    low, high = torch.minimum(drawn, other), torch.maximum(drawn, other)
    chance = ((groups - low) / (high - low)).nan_to_num(0.0, 0.0, 0.0).clamp(0, 1)
    return restore(low), restore(high), [restore(1 - chance), restore(chance)]


def _ends_of_dither(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Half a step below and above every element: with it, Simpson's rule for the mean over a step."""
    groups, restore = _grouped(x)
    half = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / (2**bits - 1) / 2 * (1 + 2**-8)
    weight = torch.full_like(x, 1 / 6)
    return restore(groups - half), restore(groups + half), [weight, weight]


def _drawn(low: torch.Tensor, high: torch.Tensor, chance: torch.Tensor, rounding: str, seed: int) -> torch.Tensor:
    """What rounding makes of a tensor, from the ends and the chances that `_codes_beside` or `_ends_of_dither` gave."""
    generator = torch.Generator(low.device).manual_seed(seed)
    noise = torch.rand(low.shape, generator=generator, device=low.device, dtype=torch.float32)
    return (
        torch.lerp(low, high, noise.to(low.dtype)) if rounding == "dither" else torch.where(noise < chance, high, low)
    )


def _grouped(x: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Groups of elements as they lie in memory order, and what puts such groups in the shape of ``x``."""
    flat = x.reshape(-1)
    missing = -flat.numel() % GROUP_SIZE
    groups = torch.cat([flat, flat[-1:].expand(missing)]).view(-1, GROUP_SIZE)
    return groups, lambda found: found.reshape(-1)[: flat.numel()].view(x.shape).to(x.dtype)


class _Weights:
    """How much the gradient minds what happens to coefficients of one shape, whose elements belong together."""

    def __init__(self, nodes: Sequence[fx.Node], slopes: SlopesOf) -> None:
        self.nodes = nodes
        probes = min(len(slopes[node]) for node in nodes)
        # By probe, coefficient and element.
        self._slopes = torch.stack([_rows([slopes[n][p] for n in nodes]) for p in range(probes)])
        self._products = {
            (a, b): (self._slopes[:, a] * self._slopes[:, b]).mean(0) * (1 + (a != b))
            for a, b in combinations_with_replacement(range(len(nodes)), 2)
        }

    def square(self, moved: torch.Tensor) -> torch.Tensor:
        """By element, the mean over probes of the squared change of the gradient; ``moved`` has a row a coefficient."""
        terms = [weight * moved[a] * moved[b] for (a, b), weight in self._products.items()]
        return functools.reduce(torch.Tensor.add_, terms)

    def sums(self, moved: torch.Tensor) -> list[float]:
        """By probe, the change of the gradient along it."""
        found: list[float] = torch.mv(self._slopes.flatten(1), moved.flatten()).tolist()
        return found


def _added(
    moved: Sequence[Values], chances: Sequence[Mapping[fx.Node, torch.Tensor | None]], weights: Sequence[_Weights]
) -> Added:
    """From what both codes do to the coefficients, with their chances (None: not known element by element)."""
    square, own_bias, bias = 0.0, 0.0, list[float]()
    for weight in weights:
        sides = [_rows([side[node] for node in weight.nodes]) for side in moved]
        known = [chance[weight.nodes[0]] for chance in chances]
        shares: list[Any] = [0.5 if chance is None else chance.reshape(-1).float() for chance in known]
        weighed = list(zip(shares, sides, strict=True))
        square += sum(float((share * weight.square(side)).sum(dtype=torch.float64)) for share, side in weighed)
        if known[0] is not None:
            mean = shares[0] * sides[0] + shares[1] * sides[1]
            own_bias += float(weight.square(mean).sum(dtype=torch.float64))
            sums = weight.sums(mean)
            bias = [a + b for a, b in zip(bias, sums, strict=True)] if bias else sums
    # The sum over elements of one probe's bias is a single number, whose square varies much from probe to probe; the
    # elements' own biases are the least of it that is known well, unless they cancel.
    squared_bias = max(sum(b * b for b in bias) / max(len(bias), 1), own_bias)
    is_finite = math.isfinite(square) and math.isfinite(squared_bias)
    is_finite = is_finite and all(bool(value.isfinite().all()) for side in moved for value in side.values())
    return Added(max(square - own_bias, 0.0), squared_bias) if is_finite else Added(math.inf, math.inf)


def _rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([x.reshape(-1).float() for x in tensors])


def _carried(x: torch.Tensor, reading: fx.Node, node: fx.Node, chain: set[fx.Node]) -> torch.Tensor | None:
    """A number for every element of ``reading`` where these elements lie in ``node``; None where they mix."""
    found: dict[fx.Node, Any] = {reading: x}
    for each in sorted(chain):
        inputs = [i for i in each.all_input_nodes if i in found]
        if each is reading or not inputs:
            continue
        if is_pointwise(each) and found[inputs[0]].shape == torch.Size(map(hint, each.meta["val"].shape)):
            found[each] = found[inputs[0]]
        elif (packet_of(each) in MOVES or each.target is getitem) and len(each.all_input_nodes) == 1:
            args, kwargs = fx.map_arg((each.args, each.kwargs), found.__getitem__)
            target: Any = each.target
            found[each] = target(*args, **kwargs)
    return found.get(node)


def _between(measured: Mapping[int, Added], bits: int) -> Added:
    """By what was measured at two widths around it, or next to it."""
    if bits in measured:
        return measured[bits]
    low = max((width for width in measured if width < bits), default=MEASURED[0])
    high = min(width for width in measured if width > low)
    share = (bits - low) / (high - low)

    def interpolated(a: float, b: float) -> float:
        if not (a > 0 and b > 0 and math.isfinite(a) and math.isfinite(b)):
            return max(a, b)
        return min(math.exp((1 - share) * math.log(a) + share * math.log(b)), sys.float_info.max)

    ends = measured[low], measured[high]
    return Added(interpolated(*(a.variance for a in ends)), interpolated(*(a.squared_bias for a in ends)))
