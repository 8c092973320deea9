"""What ``gact_fx.estimate`` says: bytes, noise and the largest batch, before anything was trained."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from gact_fx.config import Config
from gact_fx.diagnostics.largest_batch import largest_batch
from gact_fx.diagnostics.noise import noise_sentence
from gact_fx.diagnostics.report import Report
from gact_fx.diagnostics.summary import megabytes, times
from gact_fx.errors import StepError, UsageError
from gact_fx.graphs.fake_steps import Fakes, rows_of, tensors_in
from gact_fx.graphs.tensors import is_subclass
from gact_fx.options import parse_budget
from gact_fx.plan import Plan
from gact_fx.training.fake_training import FakeTraining
from gact_fx.training.minibatch_variance import LossFunction
from gact_fx.training.unchanged import modules_of, unchanged

NOT_MEASURED = "not known: it takes real numbers; noise=True measures it on the batch"


@dataclass(frozen=True)
class Estimate:
    """What a planned step of training would take, in bytes. ``print(estimate)`` has it in a few lines.

    Attributes:
        rows: rows of the batch; None where its tensors have none in common.
        budget: the budget of the plan, as text.
        peak: the most that is live at a time in a step, above what is there when it begins, gradients included.
        gradients: what the step leaves: the gradients of the parameters.
        held: what is held between forward and backward by the plan, parameters and the batch excluded.
        held_plain: the same under plain ``torch.compile``.
        noise: what compression adds to the variance of the gradient, as a share of the variance that minibatch
            gradients have anyway; None where it was not measured.
        noise_text: the noise in words, or why it is not known.
        model: parameters and buffers.
        batch: the batch itself.
        optimizer: the optimizer's state.
        graphs: how many graphs the step runs. Figures are sums over all of them.
        memory: the memory that was asked about, None if none was.
        largest_batch: the most rows of which everything fits into ``memory``; 0 where not even one does.
        report: every saved tensor, as ``gact_fx.inspect`` gives it of a compiled model.
    """

    rows: int | None
    budget: str
    peak: int
    gradients: int
    held: int
    held_plain: int
    noise: float | None
    noise_text: str
    model: int
    batch: int
    optimizer: int
    graphs: int
    memory: int | None = None
    largest_batch: int | None = None
    title: str = "the model"
    report: Report = field(default_factory=lambda: Report((), (), None, ""), repr=False)

    @property
    def total(self) -> int:
        """Everything: the model, the batch, the optimizer's state, and the peak of a step."""
        return self.model + self.batch + self.optimizer + self.peak

    @property
    def ratio(self) -> float:
        """``held_plain / held``; 1 where nothing is held."""
        return self.held_plain / self.held if self.held else 1.0

    def __str__(self) -> str:
        rows = "" if self.rows is None else f", {self.rows} rows"
        parts = f"{megabytes(self.model)} model, {megabytes(self.optimizer)} optimizer, {megabytes(self.batch)} batch"
        less = times(self.held_plain, self.held)
        graphs = f", in {self.graphs} graphs" if self.graphs > 1 else ""
        lines = [
            f"{self.title}{rows}, {self.budget}: estimated, nothing was trained",
            f"peak of a step:    {megabytes(self.peak)} MB, of which {megabytes(self.gradients)} MB are gradients",
            f"held for backward: {megabytes(self.held)} MB; {megabytes(self.held_plain)} MB under torch.compile"
            f"{f' ({less})' if less else ''}{graphs}",
            f"noise:             {self.noise_text}",
            f"in all:            {megabytes(self.total)} MB: the peak, and in MB {parts}",
        ]
        if self.memory is not None:
            found = "does not depend on the rows" if self.largest_batch is None else f"{self.largest_batch} rows"
            lines.append(f"largest batch:     {found} in {megabytes(self.memory)} MB")
        return "\n".join(lines)


@dataclass(frozen=True)
class Subject:
    """What is estimated: ``make(rows)`` gives a world of fakes with the model and a batch of so many rows there.

    None stands for the ``rows`` that there are. ``plan`` was measured, if there is one; ``optimizer_states`` counts the
    tensors as large as the parameters that the optimizer keeps.
    """

    make: Callable[[int | None], tuple[Fakes, nn.Module, Any]]
    rows: int | None
    loss_fn: LossFunction
    config: Config
    plan: Plan | None = None
    optimizer_states: int = 2

    @classmethod
    def of(cls, model: nn.Module, batch: Any, loss_fn: LossFunction, config: Config, **more: Any) -> "Subject":
        """A real model and a real batch, both of which stay as they are."""
        if any(map(is_subclass, model.parameters())):
            raise StepError(
                "gact_fx.estimate: parameters that are sharded (DTensor) cannot be copied without data; estimate the "
                "model before fully_shard"
            )
        rows = rows_of(batch)

        def make(count: int | None) -> tuple[Fakes, nn.Module, Any]:
            fakes = Fakes()
            return fakes, fakes.copy(model), fakes.copy(batch, {} if count is None or rows is None else {rows: count})

        return cls(make, rows, loss_fn, config, **more)


def memory_nbytes(memory: int | str | None) -> int | None:
    """Bytes of memory as people write it.

    Raises:
        ValueError: what is written is no number of bytes.
    """
    nbytes = parse_budget(memory) if isinstance(memory, str) else memory
    if memory is not None and (not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes <= 0):
        raise UsageError(
            f'gact_fx.estimate: memory must be a number of bytes, or a text as "8GB" or "2GiB", got {memory!r}'
        )
    return nbytes if isinstance(nbytes, int) else None


def make_estimate(subject: Subject, memory: int | None) -> Estimate:
    """The estimate, with the largest batch for ``memory`` bytes if these are given.

    Raises:
        StepError: the step cannot be run without data.
    """
    if memory is not None and subject.rows is None:
        raise UsageError("gact_fx.estimate: memory= needs a batch with tensors whose first size is the rows, got none")
    with unchanged(modules_of(subject.loss_fn)):
        found = _estimate(subject, subject.rows)
        if memory is None or subject.rows is None:
            return found
        known = {subject.rows: found.total}

        def needs(rows: int) -> int:
            if rows not in known:
                known[rows] = _estimate(replace(subject, plan=None), rows).total
            return known[rows]

        return replace(found, memory=memory, largest_batch=largest_batch(needs, subject.rows, memory))


def _estimate(subject: Subject, rows: int | None) -> Estimate:
    config = subject.config
    fakes, model, batch = subject.make(None if rows == subject.rows else rows)
    try:
        step = FakeTraining(fakes, model, batch, subject.loss_fn, config).step(subject.plan)
    except StepError as error:
        if rows == subject.rows:
            raise
        raise StepError(f"{error} (with {rows} rows in place of {subject.rows}, to find the largest batch)") from error
    report = Report.from_session(step.session, model)
    trained = sum(_nbytes(p) for p in model.parameters() if p.requires_grad)
    plan = subject.plan
    has_noise = plan is not None and plan.variance is not None and bool(plan.minibatch_variance)
    return Estimate(
        rows=rows,
        budget=_budget(config),
        peak=step.peak,
        gradients=step.gradients,
        held=report.bytes_after,
        held_plain=step.plain,
        noise=plan.variance / plan.minibatch_variance if has_noise else None,  # type: ignore[union-attr, operator]
        noise_text=NOT_MEASURED if plan is None else noise_sentence(plan) or "not known: the batch gave no measurement",
        model=sum(map(_nbytes, (*model.parameters(), *model.buffers()))),
        batch=sum(map(_nbytes, tensors_in(batch))),
        optimizer=subject.optimizer_states * trained,
        graphs=len(report.graphs),
        title=step.session.title,
        report=report,
    )


def _budget(config: Config) -> str:
    for name in ("budget_bytes", "max_gradient_noise"):
        if getattr(config, name) is not None:
            return f"{name}={getattr(config, name)!r}"
    return f"budget_bits={config.budget_bits:g}"


def _nbytes(x: Any) -> int:
    return int(x.untyped_storage().nbytes())
