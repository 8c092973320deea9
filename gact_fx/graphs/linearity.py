"""Tests operators numerically: is what a node computes linear, or affine, in some of its inputs, element by element?

A handful of random numbers of many magnitudes and both signs tells, for any operator that works element by element.

Private, tried with torch 2.11 and 2.13: ``torch.utils._python_dispatch._disable_current_modes`` (numbers are wanted
where passes run among fake tensors; public would be a way to leave fake modes).
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from gact_fx.graphs.operators import name_of

_COUNT = 64
# Of these so many must be finite to say something.
_FEWEST = 8
# Of a result's own precision.
_TOLERANCE = 64
# They work element by element, but PyTorch does not say so.
_UNTAGGED = frozenset({"clone", "convert_element_type", "_to_copy", "masked_fill", "gelu_backward"})


def is_pointwise(node: fx.Node) -> bool:
    """Whether every element of the node's result follows from one element of each tensor that it reads."""
    if node.op != "call_function":
        return False
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or name_of(node.target) in _UNTAGGED


def is_linear(node: fx.Node, inputs: Collection[fx.Node]) -> bool:
    """Whether a pointwise node is linear in ``inputs`` taken together, whatever its other inputs."""
    return _combines(node, inputs, (-2.5, 0.75))


def is_affine(node: fx.Node, inputs: Collection[fx.Node]) -> bool:
    """Whether a pointwise node is linear in ``inputs`` taken together, up to what it makes of zeros."""
    return _combines(node, inputs, (-1.5, 2.5))


def _combines(node: fx.Node, inputs: Collection[fx.Node], factors: tuple[float, float]) -> bool:
    """Whether a combination of two inputs gives that combination of their results."""
    with _disable_current_modes(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        others = {i: _numbers(i, generator) for i in node.all_input_nodes}
        left, right = ({i: _numbers(i, generator) for i in inputs} for _ in range(2))
        both = {i: factors[0] * left[i] + factors[1] * right[i] for i in inputs}
        try:
            a, b, c = (_call(node, {**others, **given}) for given in (left, right, both))
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            # It has no kernel for such numbers.
            return False
        if not all(isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() == _COUNT for x in (a, b, c)):
            return False
        precision = _TOLERANCE * torch.finfo(c.dtype).eps
        a, b, c = a.double() * factors[0], b.double() * factors[1], c.double()
        # Where an operator is not defined it says nothing.
        is_finite = a.isfinite() & b.isfinite() & c.isfinite()
        is_close: torch.Tensor = (a + b - c).abs() <= precision * (a.abs() + b.abs() + c.abs())
        return int(is_finite.sum()) >= _FEWEST and bool(is_close[is_finite].all())


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    target: Any = node.target
    kwargs = {**kwargs, **({"device": "cpu"} if kwargs.get("device") is not None else {})}
    return target(*args, **kwargs)


def _constant(node: fx.Node) -> Any:
    """The number that every element of a node is that reads nothing; None of other nodes."""
    numbers = [x for x in node.args if isinstance(x, int | float)]
    is_constant = name_of(node.target) in ("full", "scalar_tensor") and not node.all_input_nodes
    return numbers[0] if is_constant and len(numbers) == 1 else None


def _numbers(node: fx.Node, generator: torch.Generator) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return value if not isinstance(value, torch.SymInt) else 2
    constant = _constant(node)
    if constant is not None:
        return torch.full((_COUNT,), constant, dtype=value.dtype)
    draws = torch.rand(_COUNT, generator=generator, dtype=torch.float64)
    if value.dtype is torch.bool:
        return draws < 0.5
    if not value.is_floating_point():
        return (draws * 8).to(value.dtype)
    # Of every magnitude from a hundredth to a hundred.
    signs = (torch.rand(_COUNT, generator=generator) < 0.5) * 2 - 1
    return (10 ** (4 * draws - 2) * signs).to(torch.float64 if value.dtype == torch.float64 else torch.float32)
