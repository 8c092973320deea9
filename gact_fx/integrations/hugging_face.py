"""A callback for the Trainer of ``transformers`` (tried with 5.24)."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from gact_fx.errors import UsageError
from gact_fx.integrations.compression import Compression
from gact_fx.plan import Plan

log = logging.getLogger("gact_fx")
PLAN_FILE = "gact_fx_plan.json"
_WHO = "gact_fx.integrations.GactTrainerCallback"


class GactTrainerCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Compiles the Trainer's model when training begins, logs what that saves, and keeps the plan with the checkpoints.

        Trainer(model, arguments, callbacks=[GactTrainerCallback(budget_bits=4)], ...)

    A model that is compiled already stays as it is. ``gact_fx_plan.json`` is written into every checkpoint's folder; a
    run that is resumed from one goes on with its plan, as if it had not been interrupted. (Under ``profile_every``,
    steps are counted anew.)

    Figures, once for every plan: ``gact_fx/bytes_before`` and ``gact_fx/bytes_after``, held for backward;
    ``gact_fx/noise``, the variance that compression adds to the gradient, as a share of what it varies by from batch to
    batch, where that is known (``gact_fx/noise_variance``, in units of squared gradient); ``gact_fx/plan_step``, the
    step in which the plan was made. They join the Trainer's next log entry. The services of ``report_to`` have read
    that by then: for these, ``trainer.add_callback(GactTrainerCallback(log=trainer.log, ...))`` makes an entry.

    Args:
        log: what to call with the figures, ``trainer.log`` for example.
        checkpoint: the folder that training is resumed from, where it is not one of ``output_dir``.
        options: those of :func:`gact_fx.compile`.

    Raises:
        ValueError: an option that does not exist, is out of range, or contradicts another one. When training begins:
            ``loss_only=True`` beside ``label_smoothing_factor``, for which the Trainer reads the logits.
    """

    def __init__(
        self,
        *,
        log: Callable[[dict[str, float]], None] | None = None,
        checkpoint: str | Path | None = None,
        **options: Any,
    ) -> None:
        self._compression = Compression(_WHO, options)
        self._log = log
        self._checkpoint = checkpoint

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compile the model, with the plan of the checkpoint that training is resumed from."""
        if self._compression.loss_only(kwargs["model"]) and args.label_smoothing_factor:
            raise UsageError(
                f"{_WHO}: loss_only=True promises that nobody reads the logits, and the Trainer computes its loss from "
                f"them, got label_smoothing_factor={args.label_smoothing_factor:g}; leave one out"
            )
        told = [entry["gact_fx/plan_step"] for entry in state.log_history if "gact_fx/plan_step" in entry]
        resumed = self._resumed(args, state) if state.global_step else None
        self._compression.begin(kwargs["model"], resumed, told[-1] if told else 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take note of a plan that was made."""
        self._compression.follow(state.global_step)
        figures = self._compression.figures() if self._log is not None else {}
        if self._log is not None and figures:
            self._log(figures)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the figures to what is logged, for the callbacks behind this one and for the history."""
        if self._log is None:
            figures = self._compression.figures()
            kwargs["logs"].update(figures)
            state.log_history[-1].update(figures)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the plan into the checkpoint's folder."""
        plan, folder = self._compression.plan, _folder(args, state)
        if plan is not None and folder is not None and args.should_save:
            plan.save(folder / PLAN_FILE)

    def _resumed(self, args: Any, state: Any) -> Plan | None:
        folder = Path(self._checkpoint) if self._checkpoint is not None else _folder(args, state)
        if folder is not None and (folder / PLAN_FILE).is_file():
            return Plan.load(folder / PLAN_FILE)
        log.warning(
            "training is resumed at step %d, and %s has no %s: a plan is made anew. If the checkpoint lies elsewhere, "
            "give its folder as GactTrainerCallback(checkpoint=...)",
            state.global_step, folder or args.output_dir, PLAN_FILE,
        )  # fmt: skip
        return None


def _folder(args: Any, state: Any) -> Path | None:
    """The folder of the present step's checkpoint, in a search for hyperparameters the latest run's; None if none."""
    if isinstance(args.resume_from_checkpoint, str) and Path(args.resume_from_checkpoint).is_dir():
        named = Path(args.resume_from_checkpoint)
        if named.name == f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}":
            return named
    output, name = Path(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    runs = sorted(output.glob(f"run-*/{name}"), key=lambda folder: folder.stat().st_mtime)
    return next((folder for folder in (output / name, *reversed(runs)) if folder.is_dir()), None)
