"""Profiling on sample batches: real steps whose gradients are thrown away, leaving the model as it was."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from tqdm import tqdm

from gact_fx.breaks.autograd_nodes import nodes_of
from gact_fx.codec.packed_tensors import compressed_saved_tensors
from gact_fx.graphs.trees import tree_leaves, tree_map
from gact_fx.profiling.gradients import are_finite, in_double, squared_norm
from gact_fx.profiling.recorder import Recorder
from gact_fx.training.session import Session, log
from gact_fx.training.usage_error import UsageError, first_line

LossFunction = Callable[[Any, Any], torch.Tensor]
Gradients = dict[torch.Tensor, torch.Tensor]
WHAT_BATCHES_ARE = "batch must be what loss_fn(model, batch), by default model(**batch) or model(*batch), takes"


def default_loss(model: Callable[..., Any], batch: Any) -> torch.Tensor:
    """``model(**batch)``, ``model(*batch)`` or ``model(batch)``; its ``.loss`` or, where it is a tensor, the output.

    Raises:
        ValueError: the output is neither.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    for loss in (getattr(output, "loss", None), output):
        if isinstance(loss, torch.Tensor):
            return loss
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
    count = graphs = 0
    noise = _Spread()
    with tqdm(desc="gact_fx: profiling", unit="tensor", disable=None, leave=False, total=0) as bar:
        for count, batch in enumerate(iterate(batches, "gact_fx.compile: sample_batches"), start=1):
            session.let_go()
            recorder.start()
            try:
                loss = loss_fn(model, batch)
            except UsageError:
                raise
            except Exception as error:
                raise ValueError(
                    f"gact_fx.compile: sample batch {count - 1} failed with {type(error).__name__}: "
                    f"{first_line(error)}; every sample {WHAT_BATCHES_ARE}"
                ) from error
            check_loss(loss)
            # The compiled backward passes run here all the same.
            gradients = _in_double(gradients_of(loss))
            steps = recorder.take()
            graphs += len(steps)
            if are_finite(gradients.values()):
                noise.add(gradients)
                session.measure(steps, bar)
            else:
                log.warning("sample batch %d has NaN or infinity in its gradients; it is left out", count - 1)
            # What was recorded must not be there while the next batch is.
            del steps
    if not count:
        raise ValueError(
            "gact_fx.compile: sample_batches is empty; give at least one batch, or leave it out to profile on the "
            "first training step"
        )
    if not graphs:
        _leave_to_eager(session, recorder)
        return
    if not session.profiles:
        raise ValueError(_no_gradient(uncompiled, batch, loss_fn))
    variance = noise.variance()
    if variance is None:
        variance = _variance_by_halves(uncompiled, batch, loss_fn, noise.mean)
    session.minibatch_variance = variance
    session.check()
    session.make_plan()


def _leave_to_eager(session: Session, recorder: Recorder) -> None:
    log.warning(
        "torch.compile captured no graph with a gradient from the sample batches, so that no plan is made; what eager "
        'PyTorch saves is compressed by eager_bits alone (TORCH_LOGS="graph_breaks" says why)'
    )
    recorder.stop()
    session.lifecycle.failed()


def _no_gradient(uncompiled: contextlib.AbstractContextManager[Any], batch: Any, loss_fn: LossFunction) -> str:
    """Why no sample batch had a finite gradient: because of the model, or of how activations are stored to profile."""
    with uncompiled as model:
        is_fine = are_finite(gradients_of(loss_fn(model, batch)).values())
    if is_fine:
        which = "the last one has with activations that are exact; please report this, and train with budget_bits=None"
    else:
        which = "the last one has none in eager PyTorch either; check the loss for NaN or infinity, and the batches"
    return f"gact_fx.compile: no sample batch has finite gradients, and {which}"


class Moments:
    """Mean and total variance of tensors that come one by one, as precise as these are (Welford's method)."""

    def __init__(self, like: torch.Tensor) -> None:
        self._count = 0
        self.mean = torch.zeros_like(like)
        self._squares = 0.0

    def add(self, value: torch.Tensor | float) -> None:
        self._count += 1
        ahead = value - self.mean
        self.mean += ahead / self._count
        self._squares += squared_norm(ahead) * (self._count - 1) / self._count

    @property
    def variance(self) -> float | None:
        """The unbiased estimate, summed over elements; None for fewer than two tensors."""
        return self._squares / (self._count - 1) if self._count > 1 else None


class _Spread:
    """The moments of all leaves' gradients."""

    def __init__(self) -> None:
        self._moments: dict[torch.Tensor, Moments] = {}

    def add(self, gradients: Gradients) -> None:
        """Add a batch's gradients; one that reaches other leaves than the first is left out."""
        if not self._moments:
            self._moments = {leaf: Moments(value) for leaf, value in gradients.items()}
        if gradients.keys() == self._moments.keys():
            for leaf, value in gradients.items():
                self._moments[leaf].add(value)

    @property
    def mean(self) -> Gradients:
        return {leaf: moments.mean for leaf, moments in self._moments.items()}

    def variance(self) -> float | None:
        """In total; None for fewer than two batches."""
        known = [moments.variance for moments in self._moments.values() if moments.variance is not None]
        return sum(known) if known else None


def gradients_of(loss: torch.Tensor) -> Gradients:
    """What ``loss.backward()`` would give the leaves, by leaf: their order depends on the compiler."""
    # What a custom function calls a variable is its own business.
    nodes = (node for node in nodes_of(loss, ()) if not isinstance(node, BackwardCFunction))
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    # Not loss.backward(), which would write .grad.
    found = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ()
    return {leaf: gradient for leaf, gradient in zip(leaves, found, strict=True) if gradient is not None}


def _in_double(gradients: Gradients) -> Gradients:
    return {leaf: in_double(gradient) for leaf, gradient in gradients.items()}


def _variance_by_halves(
    uncompiled: contextlib.AbstractContextManager[Any], batch: Any, loss_fn: LossFunction, whole: Gradients
) -> float | None:
    """The variance of the gradient over batches, from two halves of one; None where the batch cannot be halved.

    The halves' gradients g and h vary by ``|g - h|^2 / 2``; that of their mean by half as much, that of their sum (a
    loss that sums over rows) by twice as much. They run as eager PyTorch does, and what they save in 8 bits.
    """
    try:
        halves = _halves(batch)
        if halves is None:
            return None
        with uncompiled as model, compressed_saved_tensors():
            first, second = (_in_double(gradients_of(loss_fn(model, half))) for half in halves)
    except Exception as error:
        # A batch need not make sense in halves; then only the warning about noise is lost.
        log.info("how the gradient varies is not known: half a batch failed with %s", first_line(error))
        return None
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


def iterate(batches: Iterable[Any], argument: str) -> Iterator[Any]:
    """``iter(batches)``; raises ValueError for ``argument`` (function and name) where these are one batch."""
    if isinstance(batches, (torch.Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise ValueError(
            f"{argument} must be an iterable of batches, got one {type(batches).__name__}; wrap it in a list"
        )
    return iter(batches)


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
