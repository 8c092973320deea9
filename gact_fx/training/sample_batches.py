"""Profiling on sample batches: real steps whose gradients are thrown away, leaving the model as it was."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from gact_fx.errors import UsageError, first_line
from gact_fx.graphs.dynamo import is_of_backend
from gact_fx.profiling.gradients import are_finite, squared_norm
from gact_fx.profiling.recorder import Recorder
from gact_fx.profiling.tape import Step
from gact_fx.training.check_plan import MeasuredStep
from gact_fx.training.minibatch_variance import (
    Gradients,
    LossFunction,
    Spread,
    Uncompiled,
    gradients_of,
    sketches_of,
    variance_by_halves,
)
from gact_fx.training.progress import profiling_bar
from gact_fx.training.session import Session, log

# More say little more, and take as long as several steps of training each.
MOST_BATCHES = 8
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
    uncompiled: Uncompiled,
) -> None:
    """Run forward and backward on the first batches with the profiling backend in place, then make the session's plan.

    ``recorder`` watches the model; within ``uncompiled()`` it runs as it was before. No ``.grad`` is written.

    Raises:
        ValueError: no batches; a loss that is not a scalar tensor with a gradient; a batch that the model rejects.
    """
    count = graphs = 0
    noise = Spread()
    latest: MeasuredStep | None = None
    finite: Any = None
    with profiling_bar() as bar:
        several = itertools.islice(iterate(batches, "gact_fx.compile: sample_batches"), MOST_BATCHES)
        for count, batch in enumerate(several, start=1):
            # What was recorded must not be there while the next batch is.
            latest = None
            gradients, steps = _run(model, recorder, batch, loss_fn, count - 1)
            if count == 1 and _runs_other_graphs(model, session, recorder, batch, loss_fn):
                gradients, steps = _run(model, recorder, batch, loss_fn, 0)
            graphs += len(steps)
            if are_finite(gradients.values()):
                noise.add(gradients)
                latest = session.measure(steps, bar)
                finite = finite if latest is None else (batch, latest.sensitivities)
            else:
                log.warning(
                    "%s: sample batch %d has NaN or infinity in its gradients; it is left out", session.title, count - 1
                )
            del steps, gradients
    if not count:
        raise UsageError(
            "gact_fx.compile: sample_batches is empty; give at least one batch, or leave it out to profile on the "
            "first training step"
        )
    if not graphs:
        _leave_to_eager(session, recorder)
        return
    if not session.profiles:
        raise UsageError(_no_gradient(uncompiled, batch, loss_fn))
    variance = noise.variance()
    if variance is None:
        variance = variance_by_halves(uncompiled, batch, loss_fn, noise.mean)
    session.minibatch_variance, session.squared_norm = variance, sum(map(squared_norm, noise.mean.values()))
    if latest is None and finite is not None:
        # The plan is tried on the last batch that was finite.
        batch, sensitivities = finite
        latest = MeasuredStep(_run(model, recorder, batch, loss_fn, count)[1], sensitivities)
    session.check(latest)
    session.make_plan()


def _runs_other_graphs(model: Any, session: Session, recorder: Recorder, batch: Any, loss_fn: LossFunction) -> bool:
    """Whether a second call runs other graphs: some models prepare themselves in their first, which breaks it up."""
    first = session.rewritten.copy()
    if len(first) > 1:
        # What the first call left still serves the second, but not the steps behind the plan, which are traced anew.
        session.lifecycle.compile_again()
    _loss(model, batch, loss_fn, 0)
    # The tape holds what this forward pass saved.
    recorder.start()
    return not set(session.rewritten[len(first) :]) <= set(first)


def _run(model: Any, recorder: Recorder, batch: Any, loss_fn: LossFunction, index: int) -> tuple[Gradients, list[Step]]:
    """Sketches of the gradients of a batch, and the step that was recorded."""
    recorder.start()
    loss = _loss(model, batch, loss_fn, index)
    check_loss(loss)
    # The compiled backward passes run here all the same.
    return sketches_of(loss), recorder.take()


def _loss(model: Any, batch: Any, loss_fn: LossFunction, index: int) -> torch.Tensor:
    try:
        return loss_fn(model, batch)
    except UsageError:
        raise
    except Exception as error:
        if is_of_backend(error):
            raise
        raise UsageError(
            f"gact_fx.compile: sample batch {index} failed with {type(error).__name__}: {first_line(error)}; every "
            f"sample {WHAT_BATCHES_ARE}"
        ) from error


def _leave_to_eager(session: Session, recorder: Recorder) -> None:
    log.warning(
        "%s: torch.compile captured no graph with a gradient from the sample batches, so that no plan is made; what "
        'eager PyTorch saves is stored in budget_bits alone. TORCH_LOGS="graph_breaks" says which line to change',
        session.title,
    )  # fmt: skip
    recorder.stop()
    session.lifecycle.failed()


def _no_gradient(uncompiled: Uncompiled, batch: Any, loss_fn: LossFunction) -> str:
    """Why no sample batch had a finite gradient: because of the model, or of how activations are stored to profile."""
    with uncompiled() as model:
        is_fine = are_finite(gradients_of(loss_fn(model, batch)).values())
    if is_fine:
        which = "the last one has with activations that are exact; please report this, and train with budget_bits=None"
    else:
        which = "the last one has none in eager PyTorch either; check the loss for NaN or infinity, and the batches"
    return f"gact_fx.compile: no sample batch has finite gradients, and {which}"


def iterate(batches: Iterable[Any], argument: str) -> Iterator[Any]:
    """``iter(batches)``; raises ValueError for ``argument`` (function and name) where these are one batch."""
    if isinstance(batches, (torch.Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise UsageError(
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
