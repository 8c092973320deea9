"""Profiling on sample batches: real steps whose gradients are thrown away, leaving the model as it was."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from tqdm import tqdm

from gact_fx.codec.packed_tensors import compressed_saved_tensors
from gact_fx.graphs.trees import tree_leaves, tree_map
from gact_fx.profiling.gradients import are_finite, in_double, squared_norm
from gact_fx.profiling.recorder import Recorder
from gact_fx.training.session import Session, log
from gact_fx.training.usage_error import UsageError

LossFunction = Callable[[Any, Any], torch.Tensor]
Gradients = dict[torch.Tensor, torch.Tensor]


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
    raise UsageError(
        f"gact_fx.compile: the model returned {type(output).__name__} without a loss; pass loss_fn(model, batch), "
        "which returns a scalar"
    )


def profile_batches(
    model: Any,
    session: Session,
    recorder: Recorder,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    uncompiled: contextlib.AbstractContextManager[Any],
) -> None:
    """Run forward and backward on every batch with the profiling backend in place, then make the session's plan.

    ``recorder`` watches the model; within ``uncompiled``, whose value is the model, it runs as it was before
    compilation. No ``.grad`` is written.

    Raises:
        ValueError: no batches; a loss that is not a scalar tensor with a gradient; a batch that the model rejects.
    """
    count = 0
    noise = _Spread()
    with tqdm(desc="gact_fx: profiling", unit="tensor", disable=None, leave=False, total=0) as bar:
        for count, batch in enumerate(_iterate(batches), start=1):
            recorder.start()
            try:
                loss = loss_fn(model, batch)
            except UsageError:
                raise
            except Exception as error:
                raise _rejected(count - 1, error) from error
            check_loss(loss)
            # Not loss.backward(), which would write .grad; the compiled backward passes run all the same.
            gradients = _gradients(loss)
            steps = recorder.take()
            if are_finite(gradients.values()):
                noise.add(gradients)
                session.measure(steps, bar)
            else:
                log.warning("sample batch %d has NaN or infinity in its gradients; it is left out", count - 1)
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
    variance = noise.variance()
    if variance is None:
        variance = _variance_by_halves(uncompiled, batch, loss_fn, noise.mean)
    session.plan_from_batches(variance)


class _Spread:
    """The variance of gradients that come one by one (Welford's method), in total over their elements."""

    def __init__(self) -> None:
        self._count = 0
        self.mean: Gradients = {}
        self._squares = 0.0

    def add(self, gradients: Gradients) -> None:
        """Add a batch's gradients; one that reaches other leaves than the first is left out."""
        if not self.mean:
            self.mean = {key: torch.zeros_like(value) for key, value in gradients.items()}
        if gradients.keys() != self.mean.keys():
            return
        self._count += 1
        for key, value in gradients.items():
            ahead = value - self.mean[key]
            self.mean[key] += ahead / self._count
            self._squares += float((ahead.conj() * (value - self.mean[key])).sum().real)

    def variance(self) -> float | None:
        """None for fewer than two."""
        return self._squares / (self._count - 1) if self._count > 1 else None


def _gradients(loss: torch.Tensor) -> Gradients:
    """The leaves' gradients in double precision, by leaf: their order depends on the compiler."""
    leaves = leaves_of(loss)
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return {leaf: in_double(g.detach()) for leaf, g in zip(leaves, found, strict=True) if g is not None}


def _variance_by_halves(
    uncompiled: contextlib.AbstractContextManager[Any], batch: Any, loss_fn: LossFunction, whole: Gradients
) -> float | None:
    """The variance of the gradient over batches, from two halves of one; None where the batch cannot be halved.

    The halves' gradients g and h vary by ``|g - h|^2 / 2``; that of their mean by half as much, that of their sum (a
    loss that sums over rows) by twice as much. They run as eager PyTorch does, and what they save in 8 bits.
    """
    halves = _halves(batch)
    if halves is None:
        return None
    gradients = []
    try:
        with uncompiled as model, compressed_saved_tensors():
            for half in halves:
                gradients.append(_gradients(loss_fn(model, half)))
    except Exception as error:
        # A batch need not make sense in halves; then only the warning about noise is lost.
        lines = str(error).strip().splitlines() or [""]
        log.info("how the gradient varies is not known: half a batch failed with %s", lines[0])
        return None
    first, second = gradients
    if not first.keys() == second.keys() == whole.keys() or not are_finite([*first.values(), *second.values()]):
        return None
    squares = _squares(first, second)
    sums = {key: value + second[key] for key, value in first.items()}
    is_mean = _squares({key: value / 2 for key, value in sums.items()}, whole) <= _squares(sums, whole)
    return squares / 4 if is_mean else squares


def _squares(left: Gradients, right: Gradients) -> float:
    return sum(squared_norm(value - right[key]) for key, value in left.items())


def _halves(batch: Any) -> tuple[Any, Any] | None:
    """The batch cut in two along the first dimension of its tensors, None where they do not agree on it."""
    tensors = [x for x in tree_leaves(batch) if isinstance(x, torch.Tensor) and x.dim()]
    rows = {x.shape[0] for x in tensors}
    if len(rows) != 1 or min(rows) < 2:
        return None
    middle = rows.pop() // 2

    def part(start: int) -> Any:
        return tree_map(lambda x: x[start : start + middle] if isinstance(x, torch.Tensor) and x.dim() else x, batch)

    return part(0), part(middle)


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


def check_loss(loss: object) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(
            f"gact_fx.compile: loss_fn must return a scalar tensor, got {found}; reduce it, for example by .mean()"
        )
    if not loss.requires_grad:
        raise UsageError(
            "gact_fx.compile: the loss has no gradient; it must depend on parameters with requires_grad=True, outside "
            "torch.no_grad()"
        )


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """The leaves that ``loss.backward()`` would give a gradient."""
    leaves, seen, stack = [], set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # What a custom function calls so is its own business.
        if not isinstance(node, BackwardCFunction) and hasattr(node, "variable"):
            leaves.append(node.variable)
        stack.extend(following for following, _ in node.next_functions)
    return leaves


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """The modules that calling ``function`` may change: itself, or what it refers to.

    That is what a function finds in its closure and globals, the attributes of a method's or a callable's object, and
    the arguments of a functools.partial; also in a list, tuple or dict there.
    """
    if isinstance(function, nn.Module):
        return [function]
    if isinstance(function, functools.partial):
        return modules_of(function.func) + _modules_in([*function.args, *function.keywords.values()])
    owner = getattr(function, "__self__", function)
    method = function if inspect.isroutine(function) else type(function).__call__
    plain = inspect.unwrap(getattr(method, "__func__", method))
    names = inspect.getclosurevars(plain) if inspect.isfunction(plain) else None
    values = [*names.nonlocals.values(), *names.globals.values()] if names else []
    return _modules_in([owner, *getattr(owner, "__dict__", {}).values(), *values])


def _modules_in(values: list[Any]) -> list[nn.Module]:
    found = []
    for value in values:
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        found += [item for item in items if isinstance(item, nn.Module)]
    return found


@contextlib.contextmanager
def unchanged(modules: list[nn.Module]) -> Iterator[None]:
    """Restore the modules' buffers and their modes of training or evaluation, and the random number generators."""
    every = [module for root in modules for module in root.modules()]
    modes = [(module, module.training) for module in every]
    # A forward may change a buffer in place, or put another tensor in its place.
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in every
        for name, buffer in module.named_buffers(recurse=False)
    ]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                setattr(module, name, buffer)
