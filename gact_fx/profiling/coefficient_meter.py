"""Measure what rounding a tensor adds to the gradient where backward bends in it: at backward's coefficients.

Backward is linear in its coefficients, the nodes that depend on saved values alone and meet a tangent. What codes of a
tensor do to these (`measure_chain`), times the squared sensitivity of the gradient to them, is what the gradient gets.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from gact_fx.codec.code import WIDTHS, Code, step_variance
from gact_fx.config import GROUP_SIZES
from gact_fx.graphs.edit import is_float, numel
from gact_fx.graphs.interpreter import GraphInterpreter
from gact_fx.graphs.replay import Replay
from gact_fx.graphs.sizes import hint
from gact_fx.passes.find_bends import dependents_within, moves
from gact_fx.passes.find_masks import derivable_nodes
from gact_fx.profiling.added_by_width import MEASURED, MEASURED_OF_CODES, NOT_FINITE, Added, at_width
from gact_fx.profiling.chains import Chain, Values
from gact_fx.profiling.elements import Elements, between, follow, is_elementwise, moves_read
from gact_fx.profiling.measure_chain import SlopesOf, measure_sample, measure_whole, sample
from gact_fx.profiling.neighbours import GROUP_SIZE
from gact_fx.profiling.rounding_meter import REFERENCE, RoundingMeter, code_bits
from gact_fx.profiling.tape import Step
from gact_fx.records import Sensitivity


def at_coefficients(
    first: Sensitivity, added: Mapping[Code, Added], share: float, *, is_tame: bool = False
) -> Sensitivity:
    """``first``, which was measured at the tensor itself, with what codes add by their effect on coefficients.

    That is known for a ``share`` of the elements and for groups of 256 neighbours, and goes for others by what first
    order says of them. ``is_tame``: backward has no poles there.
    """
    variances, biases, coherent = {}, {}, {}
    for code, variance in first.variances.items():
        like = replace(code, group_size=GROUP_SIZE, per_channel=False)
        if code.rounding == "rotated":
            of = _of_rotated(code, first, added, is_tame)
        elif like not in added:
            # Of bfloat16, by how fast what the finest codes add shrinks with their bits.
            like = replace(like, bits=WIDTHS[-1])
            fast = _order_of_shrinking(added[replace(like, bits=WIDTHS[-1] // 2)], added[like])
            finest = first.variances[like]
            variance = finest * (variance / finest) ** fast if 0 < variance < finest < math.inf else variance
            of = added[like]
        else:
            of = added[like]
        is_known = 0 < of.first < math.inf and 0 < variance < math.inf
        ratio = variance / of.first if is_known else 1 / share
        coherent[code] = ratio**2 * of.coherent_bias
        biases[code] = ratio * of.own_bias + coherent[code]
        variances[code] = ratio * of.variance + biases[code]
    for code, variance in variances.items():
        dithered = replace(code, rounding="dither")
        # The few elements that count may be least in their groups, by chance, and codes of these have no error.
        if variance == 0 and dithered in variances:
            variances[code], biases[code] = variances[dithered], biases[dithered]
            coherent[code] = coherent[dithered]
    known = [bits for bits in (REFERENCE.bits, WIDTHS[-1]) if variances[replace(REFERENCE, bits=bits)] < math.inf]
    value = variances[replace(REFERENCE, bits=known[0])] / step_variance(known[0]) if known else math.inf
    return Sensitivity(value, variances, {}, biases, coherent_biases=coherent, places=first.places)


def _of_rotated(code: Code, first: Sensitivity, added: Mapping[Code, Added], is_tame: bool) -> Added:
    """What rotated codes add: as much as dither of the same variance, of a fraction of bits between two widths.

    Their errors have no bound. Where backward may have a pole, those of 1 bit are not taken, and the others where half
    the group's range leads to none.
    """
    by_width = {bits: added[Code(bits, "dither", GROUP_SIZE)] for bits in WIDTHS}
    if not is_tame and (code.bits == 1 or not math.isfinite(by_width[1].total)):
        return NOT_FINITE
    variance, widest = first.variances[code], first.variances[Code(1, "dither", code.group_size)]
    if not 0 < variance < widest < math.inf:
        return by_width[1]
    return at_width(by_width, min(math.log2(1 + math.sqrt(widest / variance)), WIDTHS[-1]))


def _order_of_shrinking(coarse: Added, fine: Added) -> float:
    """The power of first order by which what codes add shrinks: 1 where backward is smooth, less where it jumps."""
    added, first = (coarse.variance, fine.variance), (coarse.first, fine.first)
    if not all(a > b > 0 and math.isfinite(a) for a, b in (added, first)):
        return 1.0
    return min(max(math.log(added[0] / added[1]) / math.log(first[0] / first[1]), 0.0), 1.0)


@dataclass(frozen=True)
class Bent:
    """What was measured of a tensor in which backward bends: what codes do to a ``share`` of its elements, by what they
    are of, and the sensitivity to its coefficients, where these may be stored. ``is_tame``: backward has no poles.
    """

    added: dict[str, dict[Code, Added]]
    coefficients: Sensitivity | None
    share: float
    is_tame: bool = False

    def result(self, first: Sensitivity) -> Sensitivity:
        """All of it; ``first`` was measured at the tensor itself."""
        found = {
            name: at_coefficients(first, added, self.share, is_tame=self.is_tame) for name, added in self.added.items()
        }
        others = {name: sensitivity for name, sensitivity in found.items() if name != "values"}
        if self.coefficients is not None:
            of, whole = self.added["values"][REFERENCE].first, first.variances[REFERENCE]
            is_known = 0 < of < math.inf and 0 < whole < math.inf
            ratio = 1.0 if self.share == 1 else whole / of if is_known else 1 / self.share
            others["coefficients"] = self.coefficients.scaled(ratio)
        return replace(found["values"], others=others)


class CoefficientMeter:
    """The coefficients of one recorded step, and the chains that lead to them from tensors in which backward bends."""

    def __init__(self, step: Step) -> None:
        bent = {how.name: how for _, how in step.analysis.quantized() if how.bends and not how.unknown}
        masks = {mask for how in step.analysis.encodings for mask in getattr(how, "masks", ())}
        nodes = {node.name: node for node in step.backward.graph.nodes}
        self._derivable = derivable_nodes(step.pair)
        self._replay = Replay(step.backward, step.arguments)
        self._interpreter = GraphInterpreter(step.backward)
        self._differentiable = GraphInterpreter(step.backward, differentiable=True)
        self._how = {nodes[name]: bent[tensor] for name, tensor in step.readings.items() if tensor in bent}
        # By what is stored: the nodes that follow from rounded values.
        self._followers: dict[fx.Node, dict[str, set[fx.Node]]] = {}
        for reading, how in self._how.items():
            self._followers[reading] = {"values": dependents_within(reading, self._derivable, masks)}
            if "bare" in how.other_ways():
                assert how.coefficients is not None
                retaken = set(how.masks) - set(how.coefficients.masks)
                self._followers[reading]["bare"] = dependents_within(reading, self._derivable, masks - retaken)
        # What only moves a coefficient's elements on their way to tangents counts as meeting these.
        self.before_tangents = set(self._derivable)
        for node in reversed(step.backward.graph.nodes):
            if moves(node) and node.users and self.before_tangents.isdisjoint(node.users):
                self.before_tangents.discard(node)
        self.of = {reading: self._ends(found["values"]) for reading, found in self._followers.items()}
        self._samples: dict[tuple[int, torch.device], torch.Tensor | None] = {}
        # By what is stored, where a sample of its elements lies in what follows; None where all are looked at.
        self._elements = {reading: self._sample(reading) for reading in self.of}
        self._kept = {end: self._positions(end) for ends in self.of.values() for end in ends}

    def kept(self, end: fx.Node, slope: torch.Tensor) -> torch.Tensor:
        """What is needed of the derivative with respect to a coefficient, flat; of all of it, three digits."""
        positions = self._kept[end]
        if positions is None or slope.numel() != numel(end):
            return slope.reshape(-1).to(torch.bfloat16)
        return slope.reshape(-1)[positions.to(slope.device)]

    def measure(self, reading: fx.Node, values: torch.Tensor, slopes: SlopesOf, own: Iterable[torch.Tensor]) -> Bent:
        """What codes of every width do, stochastic and dithered, in groups of 256.

        ``values`` are those that ``reading`` has, ``slopes`` the derivatives of the gradient with respect to
        `of[reading]` and ``own`` to itself, one per probe.
        """
        values = values.detach()
        slopes = {node: slopes[node] for node in self.of[reading] if node in slopes}
        followers = self._followers[reading]
        chains = {stored: self._chain(reading, nodes, list(slopes)) for stored, nodes in followers.items()}
        # Of another batch size than the traced one, shapes in the graph do not say where elements lie.
        elements = self._elements[reading] if values.numel() == numel(reading) else None
        if elements is not None:
            slopes = {node: [self._picked(node, s, elements[node]) for s in found] for node, found in slopes.items()}
        of_values = [s if elements is None else s.reshape(-1)[elements[reading].positions] for s in own]
        bits = code_bits(reading)
        widths = MEASURED if bits is None or bits > WIDTHS[-1] else MEASURED_OF_CODES
        is_tame = self._how[reading].is_tame
        added = {
            stored: measure_sample(chain, values, slopes, of_values, elements, widths, is_tame=is_tame)
            if elements is not None
            else measure_whole(chain, followers[stored], values, slopes, of_values, widths)
            for stored, chain in chains.items()
        }
        share = 1.0 if elements is None else len(elements[reading].positions) / max(values.numel(), 1)
        return Bent(added, self._meter(reading, values, slopes, elements), share, is_tame)

    def _sample(self, reading: fx.Node) -> dict[fx.Node, Elements] | None:
        ends = self.of[reading]
        # The device of what is traced may be another one.
        stored = self._replay.inputs[reading.name if reading.op == "placeholder" else reading.all_input_nodes[0].name]
        size = numel(reading), stored.device
        if size not in self._samples:
            self._samples[size] = sample(*size)
        positions = self._samples[size]
        if positions is None or not all(is_elementwise(reading, n, ends) for n in self._followers[reading].values()):
            return None
        nodes = set().union(*self._followers[reading].values())
        if not is_elementwise(reading, nodes, ends):
            return None
        chain = between(reading, nodes, ends)
        read = self._replay.evaluate({node.name for node in moves_read(chain, reading)})
        outside = {node: read[node.name] for node in moves_read(chain, reading)}
        shape = torch.Size(map(hint, reading.meta["val"].shape))
        return follow(reading, chain, shape, positions, outside, self._interpreter.call_function)

    def _positions(self, end: fx.Node) -> torch.Tensor | None:
        """Those at which the derivative with respect to ``end`` is needed, in order; None for everywhere."""
        found = [self._elements[reading] for reading, ends in self.of.items() if end in ends]
        positions = [elements[end].positions for elements in found if elements is not None]
        if len(positions) < len(found):
            return None
        if all(each is positions[0] for each in positions):
            return positions[0]
        if sum(map(len, positions)) > numel(end) // 2:
            return None
        ordered: torch.Tensor = torch.cat(positions).unique()
        return ordered

    def _picked(self, end: fx.Node, slope: torch.Tensor, at: Elements) -> torch.Tensor:
        """Of what was kept of the derivative with respect to ``end``, that of some elements."""
        positions = self._kept[end]
        if positions is None or slope.numel() == numel(end):
            return slope.reshape(-1)[at.positions]
        return slope[torch.searchsorted(positions, at.positions)]

    def _ends(self, nodes: set[fx.Node]) -> list[fx.Node]:
        inside = self.before_tangents
        return [n for n in sorted(nodes & inside) if is_float(n) and any(user not in inside for user in n.users)]

    def _chain(
        self, start: fx.Node, nodes: set[fx.Node], ends: Sequence[fx.Node], by: GraphInterpreter | None = None
    ) -> Chain:
        outside = {i for node in nodes - {start} for i in node.all_input_nodes if i not in nodes}
        found = self._replay.evaluate({node.name for node in outside})
        given = {node: found[node.name] for node in outside}
        return Chain(start, nodes, ends, given, by or self._interpreter)

    def _meter(
        self, reading: fx.Node, values: torch.Tensor, slopes: SlopesOf, elements: Mapping[fx.Node, Elements] | None
    ) -> Sensitivity | None:
        """What codes of the coefficients themselves would add."""
        how = self._how[reading]
        if "coefficients" not in how.other_ways():
            return None
        assert how.coefficients is not None
        followers = self._followers[reading]["values"]
        nodes = {node.name: node for node in followers}
        # The tensor itself has another name where it is decompressed.
        parts = [nodes.get(name, reading) for name in how.coefficients.nodes]

        def evaluate(ends: Sequence[fx.Node], given: Mapping[fx.Node, torch.Tensor]) -> Values:
            chain = self._chain(reading, followers, ends, self._differentiable)
            if elements is None:
                return chain.evaluate(values, given)
            return chain.evaluate_at(values.reshape(-1)[elements[reading].positions], elements, given)

        exact = evaluate(parts, {})
        meter = RoundingMeter(torch.cat([exact[node].reshape(-1) for node in parts]))
        # What is stored may be what coefficients follow from, by affine operators.
        with torch.enable_grad():
            stored = {node: value.detach().requires_grad_() for node, value in exact.items()}
            ends = evaluate(list(slopes), stored)
        for probe in range(max((len(found) for found in slopes.values()), default=0)):
            reached = {node: found[probe] for node, found in slopes.items() if probe < len(found)}
            along = {ends[n]: s.view_as(ends[n]).to(ends[n].dtype) for n, s in reached.items() if ends[n].requires_grad}
            of = torch.autograd.grad(
                list(along), [stored[n] for n in parts], list(along.values()),
                retain_graph=True, allow_unused=True, materialize_grads=True,
            )  # fmt: skip
            meter.add(torch.cat([slope.reshape(-1) for slope in of]))
        return meter.result(GROUP_SIZES)
