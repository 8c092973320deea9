"""``gact_fx::linear_cross_entropy``: the cross-entropy of a linear layer, whose output is never there whole.

Of rows ``hidden`` (N, D) and a ``weight`` (V, D), the logits (N, V) of a language model are larger than anything else
in it. Here they are computed, used and forgotten slab by slab, a slab being some of the V columns for all rows: in
forward for the logarithm of every row's sum of exponentials, and again in backward for the gradients, where each
slab gives its own rows of the weight's gradient and a part of the gradient of ``hidden``. So backward computes one
matrix product more, and needs nothing from forward but that logarithm.

The loss of row i with target t, weights w of classes and label smoothing e is, as `torch.nn.functional.cross_entropy`
defines it with ``reduction="none"``::

    (1 - e) w_t (lse_i - z_t) + e / V sum_c w_c (lse_i - z_c)

Logits z may be ``scale`` times the linear layer's result, and capped: ``cap * tanh(scale * result)`` where ``cap`` is
not 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gact_fx.graphs.operators import assert_async
from gact_fx.graphs.sizes import hint

# Elements of a slab: 8 MiB of float32 on a CPU, where larger slabs take no less time, and 32 MiB elsewhere. Of many
# rows a slab has as many as ``hidden``: slabs of fewer columns than that make a GPU read ``hidden`` more often than
# anything else.
SLAB, SLAB_OF_GPU = 2**21, 2**23
# Columns that a matrix product is worth calling for.
_FEWEST = 256

_library = torch.library.Library("gact_fx", "FRAGMENT")
_library.define(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, "
    "Tensor? logits, int ignore_index, float label_smoothing, float scale=1.0, float cap=0.0) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "linear_cross_entropy_backward(Tensor grad_loss, Tensor grad_lse, Tensor hidden, Tensor weight, Tensor? bias, "
    "Tensor target, Tensor? class_weight, Tensor lse, int ignore_index, float label_smoothing, bool[3] output_mask, "
    "float scale=1.0, float cap=0.0) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    logits: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    scale: float = 1.0,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The loss and the logarithm of the sum of exponentials of every row, both (N,), float32 or float64.

    ``weight`` and ``bias`` may be wider than ``hidden``, as they are under autocast: each slab of them is rounded to
    the dtype of ``hidden`` when it is used, and their gradients have their own dtype. ``target`` (N,) has whole numbers
    in [0, V), or ``ignore_index`` where a row's loss is zero. ``logits`` (N, V), scaled and capped, are those of
    ``hidden`` where somebody has computed them anyway. No gradient flows to the last two.

    Raises:
        IndexError: a target out of range; on other devices than the CPU, an assertion on the device.
    """
    classes, target = weight.shape[0], target.long()
    counts = target != ignore_index
    _check_targets(target, counts, classes)
    row_target = torch.where(counts, target, 0)
    real = real_dtype(hidden)
    lse = hidden.new_full(target.shape, -torch.inf, dtype=real)
    at_target, total = torch.zeros_like(lse), torch.zeros_like(lse)
    for slab in _slabs(hidden, weight, bias, real, logits):
        if logits is None:
            scale_(slab.real, scale, cap)
        inside, index = _places(row_target, slab)
        at_target = torch.where(inside, slab.real.gather(1, index)[:, 0], at_target)
        if label_smoothing:
            total += slab.real.sum(1) if class_weight is None else slab.real @ class_weight[slab.classes].to(real)
        lse = torch.logaddexp(lse, _logsumexp_(slab.real))
    of_row, of_all = _class_weights(class_weight, row_target, classes, real)
    loss = (1 - label_smoothing) * of_row * (lse - at_target)
    if label_smoothing:
        loss = loss + label_smoothing / classes * (of_all * lse - total)
    return torch.where(counts, loss, 0), lse


def linear_cross_entropy_backward(
    grad_loss: Tensor,
    grad_lse: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    output_mask: Sequence[bool],
    scale: float = 1.0,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias; empty where ``output_mask`` does not ask for them."""
    classes, real, target = weight.shape[0], real_dtype(hidden), target.long()
    counts = target != ignore_index
    row_target = torch.where(counts, target, 0)
    loss = torch.where(counts, grad_loss, 0)
    of_row, of_all = _class_weights(class_weight, row_target, classes, real)
    at_target = loss * (1 - label_smoothing) * of_row
    everywhere = loss * (label_smoothing / classes)
    of_softmax = at_target + everywhere * of_all + grad_lse
    of_hidden, of_weight, of_bias = _empty_gradients(hidden, real, weight, bias, output_mask)
    of_hidden.zero_()
    for slab in _slabs(hidden, weight, bias, real):
        scale_(slab.real, scale, cap)
        slope = slope_at(slab.real, scale, cap)
        change = slab.real.sub_(lse[:, None]).exp_().mul_(of_softmax[:, None])
        inside, index = _places(row_target, slab)
        change.scatter_add_(1, index, torch.where(inside, -at_target, 0)[:, None])
        if label_smoothing:
            if class_weight is None:
                change.sub_(everywhere[:, None])
            else:
                change.addcmul_(everywhere[:, None], class_weight[slab.classes].to(real), value=-1)
        if slope is not None:
            change.mul_(slope)
            del slope
        if output_mask[2]:
            of_bias[slab.classes] = change.sum(0)
        rounded = slab.logits.copy_(change)
        if output_mask[1]:
            if weight.dtype == hidden.dtype:
                torch.mm(rounded.t(), hidden, out=of_weight[slab.classes])
            else:
                of_weight[slab.classes] = rounded.t() @ hidden
        if output_mask[0]:
            if real == hidden.dtype:
                of_hidden.addmm_(rounded, slab.weight)
            else:
                of_hidden.add_(rounded @ slab.weight)
    return of_hidden.to(hidden.dtype), of_weight, of_bias


def real_dtype(hidden: Tensor) -> torch.dtype:
    """What exponentials are added in."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class _Slab:
    """Some ``classes``, their ``weight`` and ``logits`` (N, C) in the dtype of hidden, and these in ``real``.

    The two may be one tensor, and the next slab is computed where they lie: new memory for each would have to be
    mapped by the kernel page by page, which takes a tenth of the time of the matrix product.
    """

    classes: slice
    weight: Tensor
    logits: Tensor
    real: Tensor


def _slabs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, known: Tensor | None = None
) -> Iterator[_Slab]:
    """Slab by slab the logits, computed anew or those that are ``known``, in ``dtype`` as well."""
    rows, width = len(hidden), columns_of_slab(hidden, weight)
    memory = hidden.new_empty(rows * width, dtype=dtype)
    own = memory if known is not None or dtype == hidden.dtype else hidden.new_empty(rows * width)
    # Whoever knows the logits needs no weight.
    rounded = None if known is not None or weight.dtype == hidden.dtype else hidden.new_empty(width, weight.shape[1])
    for start in range(0, len(weight), width):
        classes = slice(start, min(start + width, len(weight)))
        shape = rows, classes.stop - start
        real, logits = (x[: rows * shape[1]].view(shape) for x in (memory, own))
        part = weight[classes] if rounded is None else rounded[: shape[1]].copy_(weight[classes])
        if known is not None:
            real.copy_(known[:, classes])
        elif bias is None:
            torch.mm(hidden, part.t(), out=logits)
        else:
            torch.addmm(bias[classes].to(hidden.dtype), hidden, part.t(), out=logits)
        yield _Slab(classes, part, logits, real if known is not None else real.copy_(logits))


def columns_of_slab(hidden: Tensor, weight: Tensor) -> int:
    """How many classes a slab has."""
    rows, features, classes = map(hint, (*hidden.shape, weight.shape[0]))
    elements = SLAB if hidden.device.type == "cpu" else SLAB_OF_GPU
    return min(max(elements // max(rows, 1), features, _FEWEST), classes)


def scale_(x: Tensor, scale: float, cap: float) -> Tensor:
    """Make logits of the linear layer's result ``x``, in its place."""
    if scale != 1:
        x.mul_(scale)
    return x.tanh_().mul_(cap) if cap else x


def slope_at(logits: Tensor, scale: float, cap: float) -> Tensor | float | None:
    """By how much ``logits`` grow with the linear layer's result; None where they are that result."""
    if cap:
        return logits.square().mul_(-scale / cap).add_(scale * cap)
    return scale if scale != 1 else None


def _logsumexp_(x: Tensor) -> Tensor:
    """``x.logsumexp(1)``, which overwrites ``x``."""
    largest = x.amax(1, keepdim=True)
    largest.masked_fill_(largest.abs() == torch.inf, 0)  # infinity less itself is no number
    return x.sub_(largest).exp_().sum(1).log_().add_(largest[:, 0])


def _places(target: Tensor, slab: _Slab) -> tuple[Tensor, Tensor]:
    """Whether a row's target is in a slab, and the column (N, 1) of the slab that it is."""
    start, stop = slab.classes.start, slab.classes.stop
    inside = (target >= start) & (target < stop)
    return inside, (target - start).clamp(0, stop - start - 1)[:, None]


def _class_weights(weights: Tensor | None, target: Tensor, classes: int, real: torch.dtype) -> tuple[Any, Any]:
    """Every row's own, and the sum of all."""
    return (1.0, float(classes)) if weights is None else (weights[target].to(real), weights.to(real).sum())


def _empty_gradients(
    hidden: Tensor, dtype: torch.dtype, weight: Tensor, bias: Tensor | None, mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients that are asked for, that of ``hidden`` in ``dtype``; the others have no element."""
    of_hidden = hidden.new_empty(hidden.shape if mask[0] else (0,), dtype=dtype)
    of_weight = weight.new_empty(weight.shape if mask[1] else (0,))
    of_bias = weight.new_empty((0,)) if bias is None else bias.new_empty(bias.shape if mask[2] else (0,))
    return of_hidden, of_weight, of_bias


def _check_targets(target: Tensor, counts: Tensor, classes: int) -> None:
    inside = ((target >= 0) & (target < classes)) | ~counts
    if target.device.type != "cpu":
        assert_async(inside.all(), "cross-entropy: a target is out of bounds")
    elif not bool(inside.all()):
        raise IndexError(f"Target {int(target[~inside][0])} is out of bounds.")


def _forward_fake(hidden: Tensor, weight: Tensor, bias: Any, target: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = target.new_empty(target.shape, dtype=real_dtype(hidden))
    return rows, torch.empty_like(rows)


def _backward_fake(
    grad_loss: Tensor, grad_lse: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(hidden, hidden.dtype, weight, bias, rest[5])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, bias, target, class_weight, _, *ctx.options = inputs
    ctx.save_for_backward(hidden, weight, bias, target, class_weight, output[1])


def _differentiate(ctx: Any, grad_loss: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    mask = [bool(needed) for needed in ctx.needs_input_grad[:3]]
    backward = torch.ops.gact_fx.linear_cross_entropy_backward.default
    found = backward(grad_loss, grad_lse, *ctx.saved_tensors, *ctx.options[:2], mask, *ctx.options[2:])
    gradients = [gradient if needed else None for gradient, needed in zip(found, mask, strict=True)]
    return (*gradients, *[None] * 7)


for _operator, _fake in ((linear_cross_entropy, _forward_fake), (linear_cross_entropy_backward, _backward_fake)):
    _library.impl(_operator.__name__, _operator, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gact_fx::{_operator.__name__}", _fake, lib=_library)
torch.library.register_autograd("gact_fx::linear_cross_entropy", _differentiate, setup_context=_save, lib=_library)
