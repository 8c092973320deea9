"""What operators have in memory for the length of a call, beside what they read and give."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from gact_fx.graphs.linear_cross_entropy import columns_of_slab, real_dtype
from gact_fx.graphs.operators import packet_of
from gact_fx.graphs.recurrent_layer import SPAN
from gact_fx.graphs.sizes import hint

aten = torch.ops.aten


def workspace_nbytes(node: fx.Node, *, fused: bool) -> int:
    """Bytes that a call of a graph has in memory until it ends.

    ``fused``: Inductor has convolutions run in oneDNN's own layout, but for those whose layout is fixed.
    """
    if (own := _OWN.get(str(node.target))) is not None:
        arguments: tuple[Any, ...] = fx.map_arg(node.args, lambda each: each.meta["val"])
        return own(*arguments)
    return copies_nbytes(node) if not fused or is_gradient_apart(node) else 0


def is_gradient_apart(node: fx.Node) -> bool:
    """Whether the gradient of a convolution's input is computed by itself."""
    return str(node.target) == "gact_fx.convolution_gradient.default"


def copies_nbytes(node: fx.Node) -> int:
    """Bytes of the copies that oneDNN, on a CPU, makes in its own layout of all that a convolution reads and gives."""
    is_backward = packet_of(node) is aten.convolution_backward
    is_gradient = is_gradient_apart(node)
    if not is_backward and not is_gradient and packet_of(node) is not aten.convolution:
        return 0
    values = [x.meta["val"] for x in (node.all_input_nodes[:2] if is_backward else (node.all_input_nodes[0], node))]
    if any(x.device.type != "cpu" or x.dim() != 4 or x.stride()[1] == 1 for x in values):
        return 0
    sizes = [hint(x.numel()) * x.dtype.itemsize for x in values]
    # In forward the copy of the input is gone before the result is copied back.
    return sum(sizes) if is_backward or is_gradient else max(sizes)


def _head_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Any, logits: Any, *options: Any
) -> int:
    """A slab of `linear_cross_entropy`, whose arguments these are."""
    return _slab_nbytes(hidden, weight, is_given=logits is not None)


def _head_backward(
    grad_loss: Tensor, grad_lse: Tensor, hidden: Tensor, weight: Tensor, bias: Any, target: Any, class_weight: Any,
    lse: Any, ignore_index: int, smoothing: float, mask: Sequence[bool], scale: float = 1.0, cap: float = 0.0,
) -> int:  # fmt: skip
    """A slab of `linear_cross_entropy_backward`, and gradients before they are rounded or added."""
    (rows, features), columns = map(hint, hidden.shape), columns_of_slab(hidden, weight)
    real, narrow = real_dtype(hidden).itemsize, hidden.dtype.itemsize
    is_narrow, is_cast = hidden.dtype != real_dtype(hidden), weight.dtype != hidden.dtype
    slope = rows * columns * real if cap else 0
    of_hidden = rows * features if mask[0] and is_narrow else 0
    of_weight = columns * features * narrow if mask[1] and is_cast else 0
    return _slab_nbytes(hidden, weight) + of_hidden * real + max(slope, of_hidden * narrow, of_weight)


def _slab_nbytes(hidden: Tensor, weight: Tensor, *, is_given: bool = False) -> int:
    """Bytes of a slab, its weight included where that is cast; ``is_given``: of logits that somebody computed."""
    (rows, features), columns, narrow = map(hint, hidden.shape), columns_of_slab(hidden, weight), hidden.dtype.itemsize
    slab = rows * columns * real_dtype(hidden).itemsize
    if is_given:
        return slab
    logits = rows * columns * narrow if hidden.dtype != real_dtype(hidden) else 0
    return slab + logits + (columns * features * narrow if weight.dtype != hidden.dtype else 0)


def _recurrent_forward(x: Tensor, h: Tensor, c: Tensor | None, *options: Any) -> int:
    """What one span of steps of `recurrent_layer` makes, whose arguments these are."""
    return _span_nbytes(x, h, options, _OF_SPANS[options[-2]][:2])


def _recurrent_backward(
    grad_y: Tensor, grad_h: Tensor, grad_c: Tensor, x: Tensor, starts_h: Tensor, starts_c: Tensor, *options: Any
) -> int:
    """What one span of `recurrent_layer_backward` makes, which is computed again and differentiated."""
    return _span_nbytes(x, grad_h, options, _OF_SPANS[options[-2]][2:])


def _span_nbytes(x: Tensor, h: Tensor, options: Sequence[Any], times: tuple[float, float]) -> int:
    *weights, batch_sizes, _, _ = options
    steps = hint(x.shape[0]) if batch_sizes is not None else min(hint(x.shape[0]), SPAN) * hint(x.shape[1])
    of_weights = sum(hint(weight.numel()) for weight in weights if weight is not None)
    return round(times[0] * steps * hint(h.shape[-1]) + times[1] * of_weights) * x.dtype.itemsize


# By mode, what the layers of torch 2.13 were measured to have in memory for a span on a CPU: how many times one number
# for every state, and how many times the weights, in forward and in backward.
_OF_SPANS = {
    "lstm": (5.2, 1.0, 20.9, 4.5),
    "gru": (4.9, 0.0, 10.8, 1.4),
    "rnn_tanh": (2.9, 0.0, 3.0, 2.1),
    "rnn_relu": (2.9, 0.0, 3.0, 2.1),
}
_OWN: dict[str, Callable[..., int]] = {
    "gact_fx.linear_cross_entropy.default": _head_forward,
    "gact_fx.linear_cross_entropy_backward.default": _head_backward,
    "gact_fx.recurrent_layer.default": _recurrent_forward,
    "gact_fx.recurrent_layer_backward.default": _recurrent_backward,
}
