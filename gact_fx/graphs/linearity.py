"""Tests operators numerically: is what a node computes linear, or affine, in some of its inputs, element by element?

A handful of random numbers of many magnitudes and both signs tells, for any operator that works element by element.

Private, tried with torch 2.11 and 2.13: ``torch.utils._python_dispatch._disable_current_modes`` (numbers are wanted
where passes run among fake tensors; public would be a way to leave fake modes).
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from gact_fx.graphs.edit import is_float
from gact_fx.graphs.operator_table import CASTS
from gact_fx.graphs.operators import OpOverload, name_of, packet_of
from gact_fx.graphs.trees import tree_leaves, tree_map

# Of sizes that no operator can mistake for each other.
_SHAPE = (2, 4, 8)
# Of these so many must be finite to say something.
_FEWEST = 8
# Of a result's own precision.
_TOLERANCE = 64
# Any threshold of what clips or shrinks lies between them.
_SCALES = (1e-20, 1e20)
# They work element by element, but PyTorch does not say so.
_UNTAGGED = frozenset({"clone", "convert_element_type", "_to_copy", "masked_fill"})


def is_pointwise(node: fx.Node) -> bool:
    """Whether every element of the node's result follows from one element of each tensor that it reads.

    One element of the gradient, which a derivative reads first, does for all.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    name = name_of(node.target)
    if torch.Tag.pointwise in node.target.tags or name in _UNTAGGED:
        return True
    # PyTorch does not say so of most derivatives of pointwise functions.
    is_formula = node.target.namespace == "aten" and name.endswith("_backward") and _are_alike(node)
    return is_formula and _is_local(node.target, *_signature(node, node.all_input_nodes))


def is_linear(node: fx.Node, inputs: Collection[fx.Node]) -> bool:
    """Whether a pointwise node is linear in ``inputs`` taken together, whatever its other inputs."""
    return _combines(node, inputs, (-2.5, 0.75))


def is_affine(node: fx.Node, inputs: Collection[fx.Node]) -> bool:
    """Whether a pointwise node is linear in ``inputs`` taken together, up to what it makes of zeros."""
    return _combines(node, inputs, (-1.5, 2.5))


def numbers(largest: float = math.inf) -> torch.Tensor:
    """Numbers of every magnitude that is usual up to ``largest``, of both signs, and 0, to try operators on.

    In float64: what overflows there nearly does so in the model itself.
    """
    with _disable_current_modes():
        found: torch.Tensor = _numbers(_Slot(0, torch.float64, True, None), torch.Generator().manual_seed(0))
        found[0, 0, 0] = 0
        return found.clamp(-largest, largest)


def spread(values: torch.Tensor, moved: float = 0.0) -> torch.Tensor:
    """As many numbers between the least and the largest, 0 among them where it lies there, ``moved`` by that share of
    the range. Decisions stay as they are.
    """
    if not values.is_floating_point():
        return values
    with _disable_current_modes():
        low, high = float(values.min()), float(values.max())
        found = torch.linspace(low, high, values.numel(), dtype=values.dtype)
        if low <= 0 <= high:
            found[found.abs().argmin()] = 0
        return found.view(values.shape) + moved * (high - low)


def are_numbers(value: torch.Tensor) -> bool:
    """Whether all of ``value``, which `tried_on` gave, is finite."""
    with _disable_current_modes():
        return bool(value.isfinite().all())


def are_near(value: torch.Tensor, other: torch.Tensor, share: float) -> bool:
    """Whether the two, which `tried_on` gave, differ by no more than that ``share`` of the largest magnitude.

    Decisions are not compared.
    """
    with _disable_current_modes():
        return not value.is_floating_point() or bool((value - other).abs().max() <= share * value.abs().max())


def tried_on(node: fx.Node, given: Mapping[fx.Node, torch.Tensor], largest: float = math.inf) -> torch.Tensor | None:
    """What a pointwise node makes of the numbers ``given`` for some of its inputs, whatever the others are.

    ``largest`` is the largest magnitude of those. None where it makes no tensor of them.
    """
    args, kwargs = _signature(node, given)
    with _disable_current_modes(), torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        slots = {slot: node.all_input_nodes[slot.index] for slot in _slots(args, kwargs)}
        values = {slot: given[i] if i in given else _numbers(slot, generator, largest) for slot, i in slots.items()}
        # Some operators take tensors of one dtype alone.
        in_float64: dict[_Slot, torch.Tensor] = {slot: _in_float64(value) for slot, value in values.items()}
        if packet_of(node) in CASTS and is_float(node):
            # What the dtype cannot hold would be infinite, but that is no pole: its numbers end there.
            return next(iter(in_float64.values()))
        return _call(node.target, args, kwargs, in_float64)


def _in_float64(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _are_alike(node: fx.Node) -> bool:
    """Whether all that ``node`` reads is a number or as large as its result, as pooling need not be."""
    result: Any = node.meta.get("val")
    values: list[Any] = [i.meta.get("val") for i in node.all_input_nodes]
    are_tensors = all(isinstance(x, torch.Tensor) for x in (result, *values))
    return are_tensors and all(not x.dim() or x.shape == result.shape for x in values)


def _combines(node: fx.Node, inputs: Collection[fx.Node], factors: tuple[float, float]) -> bool:
    """Whether a combination of two inputs gives that combination of their results."""
    return _tried(node.target, *_signature(node, inputs), factors)


def _signature(node: fx.Node, inputs: Collection[fx.Node]) -> tuple[Any, Any]:
    slots: dict[fx.Node, Any] = {i: _slot(i, at, i in inputs) for at, i in enumerate(node.all_input_nodes)}
    args, kwargs = fx.map_arg((node.args, node.kwargs), slots.__getitem__)
    return _hashable(args), _hashable(kwargs)


@dataclass(frozen=True)
class _Slot:
    """An input: which, its dtype (None of sizes), whether it varies, and the number that all its elements are."""

    index: int
    dtype: torch.dtype | None
    varies: bool
    constant: float | None


def _slot(node: fx.Node, index: int, varies: bool) -> _Slot:
    value = node.meta.get("val")
    dtype = value.dtype if isinstance(value, torch.Tensor) else None
    numbers = [x for x in node.args if isinstance(x, int | float)]
    is_constant = name_of(node.target) in ("full", "scalar_tensor") and not node.all_input_nodes and len(numbers) == 1
    return _Slot(index, dtype, varies, numbers[0] if is_constant else None)


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((name, _hashable(x)) for name, x in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


@functools.lru_cache(maxsize=4096)
def _tried(target: Any, args: tuple[Any, ...], kwargs: tuple[Any, ...], factors: tuple[float, float]) -> bool:
    with _disable_current_modes(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        slots = _slots(args, kwargs)
        others = {slot: _numbers(slot, generator) for slot in slots}
        left, right = ({slot: _numbers(slot, generator) for slot in slots if slot.varies} for _ in range(2))
        both = {slot: factors[0] * left[slot] + factors[1] * right[slot] for slot in left}
        a, b, c = (_call(target, args, kwargs, {**others, **given}) for given in (left, right, both))
        if a is None or b is None or c is None or not c.is_floating_point():
            return False
        precision = _TOLERANCE * torch.finfo(c.dtype).eps
        a, b, c = a.double() * factors[0], b.double() * factors[1], c.double()
        # Where an operator is not defined it says nothing.
        is_finite = a.isfinite() & b.isfinite() & c.isfinite()
        is_close: torch.Tensor = (a + b - c).abs() <= precision * (a.abs() + b.abs() + c.abs())
        if int(is_finite.sum()) < _FEWEST or not bool(is_close[is_finite].all()):
            return False

        def call(change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
            return _call(target, args, kwargs, {**others, **{slot: change(x) for slot, x in left.items()}})

        zero, once = call(torch.zeros_like), call(lambda x: x)
        if zero is None or once is None:
            return False
        scaled = ((scale, call(functools.partial(torch.mul, other=scale))) for scale in _SCALES)
        if not all(many is not None and _is_scaled(many, zero, once, scale, precision) for scale, many in scaled):
            return False
        if not all(x.is_floating_point() for x in left.values()):
            return True
        unknown = call(lambda x: torch.full_like(x, math.nan))
        # What is not a number stays so, where numbers matter: `nan_to_num` is there to stop it.
        return unknown is not None and bool(unknown[(once != zero) & once.isfinite()].isnan().all())


def _is_scaled(many: torch.Tensor, zero: torch.Tensor, once: torch.Tensor, scale: float, precision: float) -> bool:
    """Whether ``many``, what an operator gives of ``scale`` times the inputs, is that multiple of what these give
    ``once``, apart from what ``zero`` gives.

    What clips or shrinks does so at a threshold that other numbers need not reach.
    """
    limits, rest = torch.finfo(many.dtype), zero.double()
    expected, found = scale * (once.double() - rest), many.double() - rest
    in_range = (expected.abs() > limits.tiny / limits.eps) & (expected.abs() < limits.max * limits.eps)
    known = in_range & rest.isfinite()
    rounding = found.abs() + scale * (once.double().abs() + rest.abs()) + rest.abs()
    is_close = (found - expected).abs() <= precision * rounding
    return bool(is_close[known].all())


@functools.lru_cache(maxsize=4096)
def _is_local(target: Any, args: tuple[Any, ...], kwargs: tuple[Any, ...]) -> bool:
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    with _disable_current_modes(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        slots = [slot for slot in _slots(args, kwargs) if slot.dtype is not None]
        values = {slot: _numbers(slot, generator) for slot in _slots(args, kwargs)}
        once = _call(target, args, kwargs, values)
        if once is None or not slots or once.shape != _SHAPE:
            return False
        others = {slot: _numbers(slot, generator) for slot in slots}
        one = torch.zeros(_SHAPE, dtype=torch.bool)
        one[1, 2, 3] = True
        for where in (one, ~one):
            changed = {slot: torch.where(where, others[slot], values[slot]) for slot in slots}
            found = _call(target, args, kwargs, {**values, **changed})
            if found is None or not torch.equal(found[~where].nan_to_num(), once[~where].nan_to_num()):
                return False
        # Coefficients are made of a gradient of one element, which must do for all: pooling would take its size.
        single = {slot: values[slot][:1, :1, :1] for slot in slots if slot.index == 0}
        expanded = {slot: value.expand(_SHAPE) for slot, value in single.items()}
        few, many = (_call(target, args, kwargs, {**values, **given}) for given in (single, expanded))
        return few is not None and many is not None and torch.equal(few.nan_to_num(), many.nan_to_num())


def _slots(args: tuple[Any, ...], kwargs: tuple[Any, ...]) -> list[_Slot]:
    return sorted({x for x in tree_leaves((args, kwargs)) if isinstance(x, _Slot)}, key=lambda slot: slot.index)


def _call(target: Any, args: tuple[Any, ...], kwargs: tuple[Any, ...], values: dict[_Slot, Any]) -> torch.Tensor | None:
    """The numbers that an operator gives, None where it has no kernel for these, or gives something else."""
    filled, options = tree_map(lambda x: values[x] if isinstance(x, _Slot) else x, (args, dict(kwargs)))
    if options.get("device") is not None:
        options["device"] = "cpu"
    try:
        found = target(*filled, **options)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None
    return found if isinstance(found, torch.Tensor) and found.numel() == math.prod(_SHAPE) else None


def _numbers(slot: _Slot, generator: torch.Generator, largest: float = math.inf) -> Any:
    if slot.dtype is None:
        return 2
    if slot.constant is not None:
        return torch.full(_SHAPE, slot.constant, dtype=slot.dtype)
    draws = torch.rand(_SHAPE, generator=generator, dtype=torch.float64)
    if slot.dtype is torch.bool:
        return draws < 0.5
    if not slot.dtype.is_floating_point:
        return (draws * 8).to(slot.dtype)
    # Of every magnitude from a hundredth to a hundred.
    signs = (torch.rand(_SHAPE, generator=generator) < 0.5) * 2 - 1
    found = (10 ** (4 * draws - 2)).clamp(max=largest) * signs
    return found.to(torch.float64 if slot.dtype == torch.float64 else torch.float32)
