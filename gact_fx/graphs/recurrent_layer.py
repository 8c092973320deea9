"""``gact_fx::recurrent_layer``: one layer, in one direction, of an LSTM, GRU or RNN, which backward computes again.

PyTorch's own recurrent layers save all gates of every step for backward; the CPU's library and cuDNN do so in a block
of bytes that nobody else can read. Here a layer saves what it reads, and its state before every `SPAN` steps. Backward
takes these spans from the last to the first, has PyTorch compute each again, and differentiates it.

Private, tried with torch 2.11 and 2.13: ``torch._C._set_mkldnn_enabled`` and its getter (public is
``torch.backends.mkldnn.flags``, which also sets TensorFloat-32 and warns of that).
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# Steps that are computed again at a time: few need little memory, many are few calls.
SPAN = 32

_library = torch.library.Library("gact_fx", "FRAGMENT")
# Packed sequences (N, I) have the ``batch_sizes`` of their steps; of other modes than "lstm" there are no cells.
_OPTIONS = (
    "Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor? w_hr, Tensor? batch_sizes, str mode, bool reverse"
)
_library.define(
    f"recurrent_layer(Tensor x, Tensor h, Tensor? c, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "recurrent_layer_backward(Tensor grad_y, Tensor grad_h, Tensor grad_c, Tensor x, Tensor starts_h, Tensor starts_c, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def recurrent_layer(x: Tensor, h: Tensor, c: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    """The outputs of all steps, the last state and its cells, and the states and cells before every span.

    ``x`` is (steps, rows, features), ``h`` and ``c`` are the first state and its cells, (rows, features). Without cells
    theirs are empty.
    """
    *weights, batch_sizes, mode, reverse = options
    y, starts_h, starts_c = x.new_empty((*x.shape[:-1], h.shape[-1])), [], []
    with torch.autocast(x.device.type, enabled=False):
        for part in _spans(x, batch_sizes, reverse):
            starts_h.append(h)
            starts_c.append(_or_empty(c, x))
            y[part], h, c = _run(x[part], h, c, weights, batch_sizes, mode, training=False)
    return y, h, _or_empty(c, x), torch.stack(starts_h), torch.stack(starts_c)


def recurrent_layer_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of x, h, c and the five weights; that of what there is not is empty."""
    return gradients(*arguments)


def differentiable_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """`recurrent_layer_backward`, through which autograd can go."""
    with _without_libraries():
        return gradients(*arguments, differentiable=True)


@contextlib.contextmanager
def _without_libraries() -> Iterator[None]:
    """Within, PyTorch computes by its own operators: the layers of the libraries have no second derivative."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def gradients(
    grad_y: Tensor, grad_h: Tensor, grad_c: Tensor, x: Tensor, starts_h: Tensor, starts_c: Tensor, *options: Any,
    differentiable: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What `recurrent_layer_backward` returns."""
    *weights, batch_sizes, mode, reverse = options
    of_x, of_weights = torch.zeros_like(x, memory_format=torch.contiguous_format), [_or_empty(None, x)] * len(weights)
    spans = list(enumerate(_spans(x, batch_sizes, reverse)))
    with torch.autocast(x.device.type, enabled=False), torch.enable_grad():
        for index, part in reversed(spans):
            given = (x[part], starts_h[index], starts_c[index] if mode == "lstm" else None, *weights)
            own = [_own(value, differentiable) for value in given]
            arrived = grad_y[part], grad_h, grad_c
            # Of a span nothing is left but these when the next one begins.
            of_x[part], grad_h, grad_c, *parts = _of_span(own, arrived, batch_sizes, mode, differentiable)
            of_weights = [a + b if a.numel() else b for a, b in zip(of_weights, parts, strict=True)]
    return of_x, grad_h, grad_c, *of_weights


def _of_span(
    given: Sequence[Any], arrived: Sequence[Tensor], batch_sizes: Tensor | None, mode: str, differentiable: bool
) -> list[Tensor]:
    """The gradients of what a span reads, which is computed again."""
    x, h, c, *weights = given
    ends = [value for value in _run(x, h, c, weights, batch_sizes, mode, training=True) if value is not None]
    there = [value for value in given if value is not None]
    found = iter(torch.autograd.grad(ends, there, arrived[: len(ends)], create_graph=differentiable))
    return [_or_empty(None, x) if value is None else next(found) for value in given]


def _run(
    x: Tensor, h: Tensor, c: Tensor | None, weights: Sequence[Tensor | None], batch_sizes: Tensor | None, mode: str,
    *, training: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The outputs of all steps, the last state and its cells, by PyTorch's own layer."""
    state = h[None] if c is None else (h[None], c[None])
    there = [weight for weight in weights if weight is not None]
    options = there, weights[2] is not None, 1, 0.0, training, False
    layer = getattr(torch, mode)
    if batch_sizes is None:
        y, *last = layer(x, state, *options, False)
    else:
        y, *last = layer(x, batch_sizes, state, *options)
    return y, last[0][0], last[1][0] if c is not None else None


def _spans(x: Tensor, batch_sizes: Tensor | None, reverse: bool) -> list[slice | Tensor]:
    """The rows of ``x`` that are computed again together, first steps first: the last ones where ``reverse``."""
    if batch_sizes is not None:
        return [_reversed_rows(batch_sizes).to(x.device)] if reverse else [slice(0, len(x))]
    steps = range(0, len(x), SPAN)
    if not reverse:
        return [slice(start, start + SPAN) for start in steps]
    return list(torch.arange(len(x) - 1, -1, -1, device=x.device).split(SPAN))


def _reversed_rows(batch_sizes: Tensor) -> Tensor:
    """Where the rows of packed sequences are in the sequences read backwards, which are packed the same."""
    lengths = (batch_sizes[:, None] > torch.arange(int(batch_sizes[0]))).sum(0)
    begins = batch_sizes.cumsum(0) - batch_sizes
    rows = [begins[lengths[:size] - 1 - step] + torch.arange(size) for step, size in enumerate(batch_sizes.tolist())]
    return torch.cat(rows)


def _own(value: Tensor | None, differentiable: bool) -> Tensor | None:
    """``value`` with a gradient of its own, which in turn has one by ``value`` if it is ``differentiable``."""
    if value is None:
        return None
    return value.view_as(value) if differentiable and value.requires_grad else value.detach().requires_grad_()


def _or_empty(value: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if value is None else value


def _forward_fake(x: Tensor, h: Tensor, c: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    spans = (x.shape[0] + SPAN - 1) // SPAN if options[5] is None else 1
    last = [torch.empty_like(h, memory_format=torch.contiguous_format), _or_empty(c, x).new_empty(_shape(c))]
    return x.new_empty((*x.shape[:-1], h.shape[-1])), *last, *(x.new_empty((spans, *part.shape)) for part in last)


def _shape(value: Tensor | None) -> Any:
    return (0,) if value is None else value.shape


def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    _, grad_h, grad_c, x, _, _, *weights = arguments[:11]
    return tuple(x.new_empty(_shape(value)) for value in (x, grad_h, grad_c, *weights))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, _, *weights, batch_sizes, ctx.mode, ctx.reverse = inputs
    ctx.save_for_backward(x, *output[3:], *weights, batch_sizes)


def _differentiate(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
    backward = torch.ops.gact_fx.recurrent_layer_backward.default
    found = backward(*given[:3], *ctx.saved_tensors, ctx.mode, ctx.reverse)
    wanted = [gradient if needed else None for gradient, needed in zip(found, ctx.needs_input_grad, strict=False)]
    return *wanted, None, None, None


for _operator, _fake in ((recurrent_layer, _forward_fake), (recurrent_layer_backward, _backward_fake)):
    _library.impl(_operator.__name__, _operator, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gact_fx::{_operator.__name__}", _fake, lib=_library)
torch.library.register_autograd("gact_fx::recurrent_layer", _differentiate, setup_context=_save, lib=_library)
