"""Profiling on sample batches: real steps whose gradients are thrown away, leaving the model as it was."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from gact_fx.recorder import Recorder
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
    model: Any, session: Session, recorder: Recorder, batches: Iterable[Any], loss_fn: LossFunction
) -> None:
    """Run forward and backward on every batch with the profiling backend in place, then make the session's plan.

    ``recorder`` watches the model. No ``.grad`` is written.

    Raises:
        ValueError: no batches; a loss that is not a scalar tensor with a gradient; a batch that the model rejects.
    """
    count = 0
    noise = _Spread()
    with tqdm(desc="gact_fx: profiling", unit="tensor", disable=None, leave=False, total=0) as bar:
        session.announce, session.progress = _bar_callbacks(bar)
        for count, batch in enumerate(_iterate(batches), start=1):
            recorder.start()
            try:
                loss = loss_fn(model, batch)
            except ValueError as error:
                if str(error).startswith("gact_fx."):
                    raise
                raise _rejected(count - 1, error) from error
            except Exception as error:
                raise _rejected(count - 1, error) from error
            _check_loss(loss)
            # Not loss.backward(), which would write .grad; the compiled backward passes run all the same.
            noise.add(torch.autograd.grad(loss, leaves_of(loss), allow_unused=True))
            session.measure(recorder.take())
    if not count:
        raise ValueError(
            "gact_fx.compile: sample_batches is empty; give at least one batch, or leave it out to profile on the "
            "first training step"
        )
    if not session.profiles:
        raise ValueError(
            "gact_fx.compile: the sample batches gave no finite gradient through a compiled graph; check the loss for "
            "NaN or infinity, and that torch.compile captures the model"
        )
    session.minibatch_variance = noise.variance()
    session.make_plan()


class _Spread:
    """The variance of gradients that come one by one (Welford's method), in total over their elements."""

    def __init__(self) -> None:
        self._count = 0
        self._means: list[torch.Tensor] = []
        self._squares = 0.0

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        values = [g.detach().double() for g in gradients if g is not None]
        if not self._means:
            self._means = [torch.zeros_like(value) for value in values]
        if [v.shape for v in values] != [m.shape for m in self._means]:
            return  # a batch that reaches other parameters
        self._count += 1
        for mean, value in zip(self._means, values, strict=True):
            ahead = value - mean
            mean += ahead / self._count
            self._squares += float((ahead * (value - mean)).sum())

    def variance(self) -> float | None:
        """None for fewer than two."""
        return self._squares / (self._count - 1) if self._count > 1 else None


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


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """The leaves that ``loss.backward()`` would give a gradient."""
    leaves, seen, stack = [], set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        stack.extend(following for following, _ in node.next_functions)
    return leaves


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """The modules that calling ``function`` may change: itself, or what a plain function refers to."""
    if isinstance(function, nn.Module):
        return [function]
    owner = getattr(function, "__self__", None)
    plain = inspect.unwrap(getattr(function, "__func__", function))
    names = inspect.getclosurevars(plain) if inspect.isfunction(plain) else None
    values = [owner, *names.nonlocals.values(), *names.globals.values()] if names else [owner]
    return [value for value in values if isinstance(value, nn.Module)]


@contextlib.contextmanager
def unchanged(modules: list[nn.Module]) -> Iterator[None]:
    """Restore the modules' buffers, and the random number generators."""
    buffers = [(buffer, buffer.detach().clone()) for module in modules for buffer in module.buffers()]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
