"""The derivative of one graph's backward pass with respect to what was saved, in little memory."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import fx

from gact_fx.codec.packed_tensors import Packed, compressed_saved_tensors, pack
from gact_fx.graphs.differentiable import Derivative, DifferentiableInterpreter, has_derivative
from gact_fx.profiling.coefficient_meter import Bent, CoefficientMeter
from gact_fx.profiling.cut_backward import Segment, cut_backward, find_loads, group_segments, inputs_of, summands
from gact_fx.profiling.probes import Signs
from gact_fx.profiling.rounding_meter import OneError, RoundingMeter, code_bits
from gact_fx.profiling.stopped_elements import StoppedElements
from gact_fx.profiling.tape import Place, Step
from gact_fx.profiling.waiting_slopes import Slopes, Waiting, WaitingSlopes, unpacked

Sources = Mapping[fx.Node, frozenset[Place]]


class Adjoint:
    """One graph's backward pass, differentiated segment by segment from its end.

    ``arriving`` are derivatives with respect to outputs, by position (none for those that reach nothing); the probes'
    ``signs`` stand for the rest. ``shared``: by name, the tensors whose error is that of other runs, too.
    """

    def __init__(
        self,
        step: Step,
        sources: Sources,
        arriving: Mapping[int, Waiting],
        signs: Signs,
        probes: int,
        shared: Mapping[str, OneError],
    ) -> None:
        self._shared = shared
        self.opaque: set[Place] = set()
        self.meters: dict[str, RoundingMeter] = {}
        self.bent: dict[str, Bent] = {}
        self._sources = sources
        self._arriving = arriving
        self._signs = signs
        self._leaves = step.leaves
        self._find_stopped = StoppedElements(step)
        self._probes = range(probes)
        self._interpreter = DifferentiableInterpreter(step.backward)
        nodes = step.backward.graph.nodes
        placeholders = step.backward.graph.find_nodes(op="placeholder")
        # Parameters among the arguments must not collect gradients.
        self._arguments = {
            placeholder: value.detach() if isinstance(value, torch.Tensor) else value
            for placeholder, value in zip(placeholders, step.arguments, strict=True)
        }
        self._coefficients = CoefficientMeter(step)
        self._bent = {how.name for _, how in step.analysis.quantized() if how.bends}
        # By tensor, the coefficients whose derivatives are kept until it is measured.
        self._waiting = {reading: set(nodes) for reading, nodes in self._coefficients.of.items()}
        self._wanted = set().union(*self._waiting.values())
        self._tangible = set(nodes) - self._coefficients.before_tangents
        self._coefficient_slopes: dict[fx.Node, Slopes] = {}
        self._probe = 0
        readings = step.readings
        self._readings = {node: readings[node.name] for node in nodes if node.name in readings}
        # Blobs are decompressed wherever a segment reads them.
        self._loads = loads = find_loads(nodes)
        whole: dict[fx.Node, list[int]] = {}
        for position, node in enumerate(step.pair.backward_outputs):
            if isinstance(node, fx.Node) and sources[node]:
                whole.setdefault(node, []).append(position)
        # The parts of a sum have its derivative: it need not be made, nor large parts be kept for it.
        known = step.leaves.keys() | arriving.keys()
        sums: set[fx.Node] = set()
        self._positions: dict[fx.Node, list[int]] = {}
        for node, positions in whole.items():
            for part in summands(node, sums) if known.issuperset(positions) else [node]:
                self._positions.setdefault(part, []).extend(positions)
        computed = [node for node in nodes if node not in loads and node not in sums and node.op != "output"]
        carriers = {node for node in computed if sources[node] and has_derivative(node.meta.get("val"))}
        self._segments = cut_backward(computed, loads, carriers, probes)
        self._kept: dict[fx.Node, Any] = {}
        self._seeds = count()
        self._slopes = WaitingSlopes()

    def run(self) -> dict[str, Waiting]:
        """Fill the meters; returns the derivatives with respect to placeholders, by name."""
        groups = group_segments(self._segments)
        self._keep_crossing(self._segments, [at for at, group in enumerate(groups) for _ in group])
        first: dict[fx.Node, int] = {}
        for at, segment in enumerate(self._segments):
            for node in inputs_of(segment):
                first.setdefault(node, at)
        for node in self._positions.keys() & self._loads:
            value = self._load(node)
            for probe in self._probes:
                self._slopes.add(node, probe, self._arrived(node, value, probe))
        at = len(self._segments)
        for group in reversed(groups):
            if any(node in self._slopes or node in self._positions for segment in group for node in segment):
                self._keep_crossing(group, range(len(group)))
            for segment in reversed(group):
                at -= 1
                self._differentiate(segment)
                self._fill(node for node in self._readings if first.get(node) == at)
        self._fill(node for node in self._readings if node not in first)
        return self._slopes.of_placeholders()

    @torch.no_grad()
    def _keep_crossing(self, segments: Sequence[Segment], groups: Sequence[int]) -> None:
        """Compute what crosses from one of the ``groups`` of segments to later ones, and is not kept yet, and pack it.

        ``groups`` has a number for each segment.
        """
        place = {node: at for at, segment in enumerate(segments) for node in segment}
        group = {node: groups[at] for node, at in place.items()}
        missing = [node for node in place if node not in self._kept]
        crosses = {node for node in missing if any(group.get(user, -1) > group[node] for user in node.users)}
        needed: set[fx.Node] = set()
        for node in reversed(missing):
            if node in crosses or any(user in needed for user in node.users):
                needed.add(node)
        dies = {node: max((place[user] for user in node.users if user in needed), default=-1) for node in needed}
        values: dict[fx.Node, Any] = {}
        for at, segment in enumerate(segments):
            crossing = [node for node in segment if node in crosses]
            alive = [node for node in values if dies[node] > at]
            wanted = {*crossing, *alive, *(node for node in segment if dies.get(node, -1) > at)}
            self._run([node for node in segment if node in needed], values, wanted, self._load)
            for node in crossing:
                value = values[node]
                self._kept[node] = pack(value, next(self._seeds)) if isinstance(value, torch.Tensor) else value
            values = {node: value for node, value in values.items() if dies.get(node, -1) > at}

    def _differentiate(self, segment: Segment) -> None:
        """Compute a segment again, and add to the derivatives with respect to what it reads."""
        ends = [node for node in segment if node in self._slopes or node in self._positions]
        if ends:
            self._replay(segment, ends)
        for node in segment:
            self._kept.pop(node, None)

    def _replay(self, segment: Segment, ends: list[fx.Node], *, doubtful: bool = False) -> None:
        derivative = Derivative()
        ahead = {node: self._slopes.take(node) for node in ends if node in self._slopes}

        def begin(node: fx.Node) -> Any:
            value = self._load(node)
            if self._sources[node] and has_derivative(value):
                return derivative.begin(value, partial(self._add_slope, node))
            return value

        def drop(node: fx.Node, value: Any) -> None:
            # Autograd holds those values that it needs; the ends of its graph hold none.
            if node in ends and isinstance(value, torch.Tensor) and value.requires_grad:
                # What `_arrived` asks of a gradient takes no memory.
                like = value.detach().new_empty(()).expand(value.shape)
                derivative.end(value, partial(self._slope_of, node, ahead.get(node), like))

        with torch.enable_grad(), compressed_saved_tensors():
            self._run(segment, {}, {}, begin, derivative, doubtful, drop)
        before = self._slopes.snapshot(), {node: list(found) for node, found in self._coefficient_slopes.items()}
        for probe in self._probes:
            self._probe = probe
            try:
                derivative.run(again=probe != self._probes[-1])
            except RuntimeError:
                if doubtful or probe:
                    raise
                # Some operator refuses only now; any other error comes again.
                self._slopes.restore(before[0])
                self._coefficient_slopes = before[1]
                self._slopes.put_back(ahead)
                return self._replay(segment, ends, doubtful=True)
            # What was replaced need not be restored any more.
            before = {}, {}
            for spent in ahead.values():
                del spent[0]

    def _add_slope(self, node: fx.Node, slope: torch.Tensor) -> None:
        self._slopes.add(node, self._probe, slope)

    def _slope_of(self, node: fx.Node, ahead: Waiting | None, like: torch.Tensor) -> torch.Tensor:
        """The derivative with respect to what a segment ends with: what waits for it, and what it is by itself."""
        parts = [unpacked(ahead[0])] if ahead else []
        if node in self._positions:
            parts.append(self._arrived(node, like, self._probe))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def _arrived(self, node: fx.Node, value: torch.Tensor, probe: int) -> torch.Tensor:
        """The derivative of v^T gradient with respect to an output."""
        parts: list[torch.Tensor] = []
        for position in self._positions[node]:
            if position in self._leaves:
                parts.append(self._signs.of(self._leaves[position], probe, value))
            elif position not in self._arriving:
                parts.append(self._signs.like(value))
            elif self._arriving[position]:
                parts.append(unpacked(self._arriving[position][probe]).reshape(value.shape).to(value.dtype))
        return sum(parts[1:], parts[0]) if parts else torch.zeros_like(value, requires_grad=False)

    def _fill(self, readings: Iterable[fx.Node]) -> None:
        """The meters of tensors whose derivatives are complete."""
        for node in readings:
            name = self._readings[node]
            values = self._load(node)
            stopped = self._find_stopped(node.name, values)
            self.meters[name] = meter = RoundingMeter(values, code_bits(node), stopped)
            waiting = self._slopes.take(node)
            if node in self._coefficients.of:
                own = map(unpacked, waiting)
                self.bent[name] = self._coefficients.measure(node, values, self._coefficient_slopes, own)
                self._waiting[node] = set()
                awaited = set().union(*self._waiting.values())
                for end in self._coefficient_slopes.keys() - awaited:
                    del self._coefficient_slopes[end]
            if name in self._shared:
                self._shared[name].add(meter, stopped, list(map(unpacked, waiting)))
            else:
                for slope in waiting:
                    meter.add(unpacked(slope), stopped)

    def _load(self, node: fx.Node) -> Any:
        if node in self._arguments:
            return self._arguments[node]
        if node in self._loads:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._load)
            return getattr(self._interpreter, node.op)(node.target, args, kwargs)
        kept = self._kept[node]
        return kept.unpack() if isinstance(kept, Packed) else kept

    def _run(
        self,
        nodes: Sequence[fx.Node],
        values: dict[fx.Node, Any],
        wanted: Collection[fx.Node],
        load: Callable[[fx.Node], Any],
        derivative: Derivative | None = None,
        doubtful: bool = False,
        drop: Callable[[fx.Node, Any], None] = lambda node, value: None,
    ) -> None:
        """Compute ``nodes`` into ``values``, and ``drop`` after its last use whatever is not ``wanted``.

        With a ``derivative``, what it is by coefficients is kept: by these as what depends on tangents reads them.
        """
        dies: dict[fx.Node, list[fx.Node]] = {}
        seen: set[fx.Node] = set(wanted)
        taken: dict[fx.Node, torch.Tensor] = {}
        for node in reversed(nodes):
            last = {node, *node.all_input_nodes} - seen
            dies[node] = list(last)
            seen |= last
        for node in nodes:
            for i in node.all_input_nodes:
                if i not in values:
                    values[i] = load(i)
            read: Callable[[fx.Node], Any] = values.__getitem__
            if derivative is not None and node in self._tangible:
                read = partial(self._take, values, taken, derivative)
            args, kwargs = fx.map_arg((node.args, node.kwargs), read)
            values[node], is_complete = self._interpreter.call(node, args, kwargs, doubtful=doubtful)
            if not is_complete:
                # Where backward bends, nothing is asked of what leads to coefficients.
                is_measured = node not in self._tangible
                self.opaque |= {at for at in self._sources[node] if not (is_measured and at[1] in self._bent)}
            for dead in dies[node]:
                drop(dead, values.pop(dead, None))

    def _take(
        self,
        values: Mapping[fx.Node, Any],
        taken: dict[fx.Node, torch.Tensor],
        derivative: Derivative,
        node: fx.Node,
    ) -> Any:
        value = values[node]
        if node not in self._wanted:
            return value
        if node not in taken:
            # Of most derivatives little is kept.
            keep = partial(self._keep_slope, node)
            if value.requires_grad:
                taken[node] = value.view_as(value)
                taken[node].register_hook(keep)
            else:
                # It comes from an operator that has no derivative.
                taken[node] = derivative.begin(value, keep)
        return taken[node]

    def _keep_slope(self, node: fx.Node, slope: torch.Tensor | None) -> None:
        # Some operators give none where it is zero.
        if slope is not None:
            kept, found = self._coefficients.kept(node, slope.detach()), self._coefficient_slopes.setdefault(node, [])
            if self._probe < len(found):
                found[self._probe] = found[self._probe] + kept
            else:
                found.append(kept)
