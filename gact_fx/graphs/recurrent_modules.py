"""nn.LSTM, nn.GRU and nn.RNN by `gact_fx.graphs.recurrent_layer`, so that torch.compile can trace them.

Dynamo leaves these modules to eager PyTorch, or (``torch._dynamo.config.allow_rnn``) takes every step apart: an LSTM of
32 steps then takes minutes to compile, and several times as long to run.

Private, tried with torch 2.13: ``torch.nn.modules.rnn._VF``, where the modules find the operator that computes
them (public would be an attribute of the modules).
"""

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence  # noqa: F401 (the modules' code reads it)

from gact_fx.graphs import recurrent_layer  # noqa: F401 (registers its operators)

_FORWARD = "forward"
# Dynamo of torch 2.11 fails on packed sequences that eager PyTorch does not compute (2.12 was not tried).
IS_FOLLOWED = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"


def install(modules: Iterable[nn.Module]) -> None:
    """Have the recurrent layers among ``modules`` compute what theirs do by our operator, where their class is none of
    the user's with a forward pass of its own; before torch 2.13 none."""
    for module in modules if IS_FOLLOWED else ():
        # Pickled, what was installed comes back as the class's own code in the same place.
        own = _FORWARDS.get(getattr(module.forward, "__func__", None))
        if own is not None:
            vars(module)[_FORWARD] = types.MethodType(own, module)


def remove(modules: Iterable[nn.Module]) -> None:
    """Undo `install`."""
    for module in modules:
        if _is_installed(module):
            del vars(module)[_FORWARD]


def can_trace(modules: Iterable[nn.Module]) -> bool:
    """Whether there are recurrent layers among ``modules``, all of which compute by our operator."""
    found = [module for module in modules if isinstance(module, nn.RNNBase)]
    return bool(found) and all(map(_is_installed, found))


def _is_installed(module: nn.Module) -> bool:
    return getattr(vars(module).get(_FORWARD), "__func__", None) in _FORWARDS.values()


def _run(mode: str, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """What ``torch.lstm`` and the like, by their name ``mode``, make of these arguments."""
    if torch.compiler.is_exporting():
        # To programs that run without gact_fx.
        own: Callable[..., tuple[Tensor, ...]] = getattr(torch, mode)
        return own(x, *rest)
    # The first state, or of packed sequences the sizes of the steps and the first state, precede the weights.
    is_packed = isinstance(rest[2], list | tuple)
    batch_sizes, (state, *options) = (rest[0], rest[1:]) if is_packed else (None, rest)
    batch_first = not is_packed and options[6]
    h, c = state if mode == "lstm" else (state, None)
    return _layers(mode, x, batch_sizes, h, c, *options[:6], batch_first=batch_first)


def _layers(
    mode: str, x: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None, weights: list[Tensor],
    has_biases: bool, num_layers: int, dropout: float, training: bool, bidirectional: bool, *, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    device, dtype, given = x.device.type, weights[0].dtype, h.dtype
    if torch.is_autocast_enabled(device) and not (mode == "gru" and device == "cpu"):
        # On the CPU autocast leaves a GRU alone, whose results are of the dtype of its state.
        dtype = given = torch.get_autocast_dtype(device)
    x, h, c = x.to(dtype), h.to(dtype), None if c is None else c.to(dtype)
    weights = [weight.to(dtype) for weight in weights]
    x = x.transpose(0, 1) if batch_first else x
    directions = 2 if bidirectional else 1
    count = len(weights) // (num_layers * directions)
    last_h, last_c = [], []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            own: list[Any] = weights[at * count : (at + 1) * count]
            own = own if has_biases else [*own[:2], None, None, *own[2:]]
            cells = None if c is None else c[at]
            found = torch.ops.gact_fx.recurrent_layer(
                x, h[at], cells, *own, *[None] * (5 - len(own)), batch_sizes, mode, direction == 1
            )
            outputs.append(found[0])
            last_h.append(found[1])
            last_c.append(found[2])
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and layer < num_layers - 1:
            x = F.dropout(x, dropout, training)
    x = (x.transpose(0, 1) if batch_first else x).to(given)
    return x, torch.stack(last_h).to(given), *([] if c is None else [torch.stack(last_c)])


class _VF:
    """What the modules' code calls by this name."""

    lstm = staticmethod(functools.partial(_run, "lstm"))
    gru = staticmethod(functools.partial(_run, "gru"))
    rnn_tanh = staticmethod(functools.partial(_run, "rnn_tanh"))
    rnn_relu = staticmethod(functools.partial(_run, "rnn_relu"))


# The code of the modules, which finds its names in this module. Dynamo looks for globals in importable modules alone.
_FORWARDS: dict[Any, Callable[..., Any]] = {
    kind.forward: types.FunctionType(kind.forward.__code__, globals(), _FORWARD, kind.forward.__defaults__)
    for kind in (nn.LSTM, nn.GRU, nn.RNN)
}
