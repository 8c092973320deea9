"""Merge a ReLU's mask into the codes of the values behind it: what the ReLU stops is NaN, which has a code of its own.

Of a group with NaN the codec spends one code on it, and the range that the other codes divide is that of the elements
that pass. A mask beside codes of as many bits costs one bit more, and the elements that it stops spread the range.

Of a ReLU's result nothing is lost: what is stopped is 0. Of what a batch norm reads in front of the ReLU, the stopped
elements come back as their mean in the channel, which follows from the others, since all standardised values of a
channel sum to zero. Backward multiplies them with nothing but the mean of ``dy xhat``. That error is not random, and
`RoundingMeter` measures what it moves the gradient by, for `allocate_bits` to weigh.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from gact_fx.graphs.aot import SavedValue
from gact_fx.graphs.edit import Add, add_full, behind
from gact_fx.graphs.operator_table import NAMES
from gact_fx.records import Standardization

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class Stopped:
    """The elements of a saved tensor that a ReLU stops, in the order of its codes.

    ``error``: what they are decoded to less what they are, None where nothing is lost. ``channel``: its dimension.
    """

    mask: torch.Tensor
    error: torch.Tensor | None
    channel: int = 1


def find_merge(
    value: SavedValue, masks: Sequence[str], by: Standardization | None, backward: Mapping[str, fx.Node]
) -> str:
    """The one of a tensor's ``masks`` that its codes can tell, true where a ReLU stops the values; '' if there is none.

    ``by`` says how the tensor is standardised.
    """
    # The steps of groups with NaN have 4 bits of mantissa, but float64's a single one.
    if value.source.meta["val"].dtype == torch.float64:
        return ""
    if by is not None:
        return by.sign if by.sign and _is_relu(backward[by.sign]) else ""
    if value.source.target is not aten.relu.default:
        return ""
    relus = [mask for mask in masks if _is_relu(backward[mask])]
    # What is compared may have got another name.
    read = {mask: behind(backward[mask].all_input_nodes[0], NAMES) for mask in relus}
    return next((mask for mask in relus if read[mask] is value.placeholder), "")


def _is_relu(mask: fx.Node) -> bool:
    """``x <= 0``: what relu's derivative asks, and `expose_decisions` writes."""
    return mask.target is aten.le.Scalar and mask.args[1:] == (0,)


def mark_stopped(values: fx.Node, mask: fx.Node, add: Add) -> fx.Node:
    """``values`` with NaN where ``mask`` is true."""
    nan = _number(float("nan"), values)
    return add(aten.where.self, (mask, nan, values), f"{values.name}_marked")


def find_stopped(values: fx.Node, add: Add) -> fx.Node:
    """The mask, from values that `mark_stopped` marked."""
    return add(aten.isnan.default, (values,), f"{values.name}_stopped")


def fill_stopped(values: fx.Node, fill: str, add: Add) -> fx.Node:
    """``values`` with the marked elements as they are decoded: "zero", or their "mean" in the channel."""
    name = values.name
    stopped = find_stopped(values, add)
    passed = add(aten.where.self, (stopped, _number(0.0, values), values), f"{name}_passed")
    if fill == "zero":
        return passed
    value = values.meta["val"]
    dims = [d for d in range(value.dim()) if d != 1]
    total = add(aten.sum.dim_IntList, (passed, dims, True), f"{name}_total")
    ones = add(convert, (stopped, value.dtype), f"{name}_ones")
    count = add(aten.sum.dim_IntList, (ones, dims, True), f"{name}_count")
    # All values of a channel sum to zero.
    rest = add(aten.neg.default, (total,), f"{name}_rest")
    mean = add(aten.div.Tensor, (rest, count), f"{name}_mean")
    return add(aten.where.self, (stopped, mean, values), f"{name}_filled")


def measure_stopped(values: torch.Tensor, mask: torch.Tensor, channel: int | None) -> Stopped:
    """``mask``, and what `fill_stopped` would change: nothing where zeros are filled in (``channel`` None).

    ``values``, whose channels are in that dimension, are those of codes that are folded by the mask, which is laid out
    alike.
    """
    if channel is None:
        return Stopped(mask, None)
    dims = [d for d in range(values.dim()) if d != channel]
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    # As `fill_stopped` has it; what passes is turned over here, by the same mask.
    mean = torch.where(mask, zero, values).sum(dims, keepdim=True) / mask.sum(dims, keepdim=True)
    return Stopped(mask, torch.where(mask, mean - values, zero), channel)


def _number(number: float, like: fx.Node) -> fx.Node:
    with like.graph.inserting_before(like):
        return add_full(like.graph, [], number, like.meta["val"])
