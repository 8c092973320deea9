"""Profiling on sample batches: real steps whose gradients are thrown away, leaving the model as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from gact_fx.session import Session

LossFunction = Callable[[Any, Any], torch.Tensor]


def default_loss(model: Callable[..., Any], batch: Any) -> torch.Tensor:
    """``model(**batch)``, ``model(*batch)`` or ``model(batch)``; its ``.loss`` or, where it is a tensor, the output.

    Raises:
        ValueError: the output is neither.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)):
        output = model(*batch)
    else:
        output = model(batch)
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    if isinstance(output, torch.Tensor):
        return output
    raise ValueError(
        f"gact_fx.compile: the model returned {type(output).__name__} without a loss; pass loss_fn(model, batch), "
        "which returns a scalar"
    )


def profile_batches(
    model: Any, session: Session, measure: Callable[[], None], batches: Iterable[Any], loss_fn: LossFunction
) -> None:
    """Run forward and backward on every batch with the profiling backend in place, then make the session's plan.

    ``measure`` is called after each batch's backward pass. Parameters, buffers, ``.grad`` and random number generators
    are left as they were, also when a batch fails.

    Raises:
        ValueError: no batches; a loss that is not a scalar tensor with a gradient; a batch that the model rejects.
    """
    count = 0
    with _unchanged(model), tqdm(desc="gact_fx: profiling", unit="tensor", disable=None, leave=False, total=0) as bar:
        session.announce, session.progress = _bar_callbacks(bar)
        for count, batch in enumerate(_iterate(batches), start=1):
            try:
                loss = loss_fn(model, batch)
            except ValueError as error:
                if str(error).startswith("gact_fx."):
                    raise
                raise _rejected(count - 1, error) from error
            except Exception as error:
                raise _rejected(count - 1, error) from error
            _check_loss(loss)
            loss.backward()
            measure()
    if not count:
        raise ValueError(
            "gact_fx.compile: sample_batches is empty; give at least one batch, or leave it out to profile on the "
            "first training step"
        )
    session.make_plan()


def _iterate(batches: Iterable[Any]) -> Iterator[Any]:
    if isinstance(batches, (torch.Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise ValueError(
            f"gact_fx.compile: sample_batches must be an iterable of batches, got one {type(batches).__name__}; "
            "wrap it in a list"
        )
    return iter(batches)


def _rejected(index: int, error: Exception) -> ValueError:
    lines = str(error).strip().splitlines() or [""]
    return ValueError(
        f"gact_fx.compile: sample batch {index} failed with {type(error).__name__}: {lines[0]}; every sample batch "
        "must be what loss_fn(model, batch), by default model(**batch) or model(*batch), takes"
    )


def _check_loss(loss: object) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(
            f"gact_fx.compile: loss_fn must return a scalar tensor, got {found}; reduce it, for example by .mean()"
        )
    if not loss.requires_grad:
        raise ValueError(
            "gact_fx.compile: the loss has no gradient; it must depend on parameters with requires_grad=True, outside "
            "torch.no_grad()"
        )


def _bar_callbacks(bar: Any) -> tuple[Callable[[int], None], Callable[[int], None]]:
    def announce(count: int) -> None:
        bar.total += count
        bar.refresh()

    return announce, lambda count: bar.update(count)


@contextlib.contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Restore a module's gradients and buffers, and the random number generators."""
    module = model if isinstance(model, nn.Module) else nn.Module()
    gradients = [(p, p.grad) for p in module.parameters()]
    buffers = [(b, b.detach().clone()) for b in module.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
