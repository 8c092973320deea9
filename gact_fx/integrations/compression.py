"""What the callbacks have in common: the model of one training run, its plan, and its figures."""

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from gact_fx.api import Samples, compile_by, inspect
from gact_fx.config import OPTIONS, Config
from gact_fx.errors import UsageError, unknown_option
from gact_fx.options import is_schedule
from gact_fx.plan import Plan
from gact_fx.training.model import compiled_module, is_copy, session_of

log = logging.getLogger("gact_fx")
_OTHERS = ("sample_batches", "loss_fn", "config", "plan")


class Compression:
    """Compiles the model of a training run, or follows one that is compiled already.

    ``options`` are those of `gact_fx.compile`; ``function`` names the callback in messages.
    """

    def __init__(self, function: str, options: Mapping[str, Any]) -> None:
        for name in options:
            if name not in (*OPTIONS, *_OTHERS):
                raise unknown_option(function, name, (*OPTIONS, *_OTHERS))
        others = {name: options.get(name) for name in _OTHERS}
        self._asked = {name: value for name, value in options.items() if name not in _OTHERS}
        # Now, and not when training begins.
        self._config = Config.from_options(self._asked, others["config"])
        self._plan: Any = others["plan"]
        batches, loss_fn = others["sample_batches"], others["loss_fn"]
        if batches is None and loss_fn is not None:
            raise UsageError(f"{function}: loss_fn is for sample_batches, got none; pass these too, or leave it out")
        self._samples = None if batches is None else Samples(batches, loss_fn)
        self._model: nn.Module | None = None
        self._seen: Plan | None = None
        # The step in which the present plan was made, 0 where there was one before training.
        self._step = 0
        self._is_told = True

    def begin(self, model: nn.Module, resumed: Plan | None, step: int = 0) -> None:
        """Compile ``model`` unless it is; with the plan of the checkpoint that training is ``resumed`` from, if any.

        ``step`` is the one in which that plan was made.
        """
        holder = compiled_module(model)
        session = session_of(holder)
        is_running = holder is not None and session is not None and not is_copy(holder, session)
        self._model = holder or model
        config = self._config if session is None else session.config
        if resumed is not None and (session is None or session.plan is None or not is_running):
            _check_budget(resumed, config)
            # The plan has spent its budget, which still rules what the plan does not know.
            compile_by(self._model, config, resumed)
            self._step = step
        elif session is not None and not is_running:
            compile_by(self._model, config, session.plan)
        elif not is_running:
            compile_by(self._model, config, self._plan, self._samples, asked=self._asked)
        self._seen, self._is_told = self.plan, self.plan is None

    def loss_only(self, model: nn.Module) -> bool:
        """Whether the options that ``model`` is or will be compiled with say that the caller reads the loss alone."""
        session = session_of(compiled_module(model))
        return (self._config if session is None else session.config).loss_only

    def follow(self, step: int) -> None:
        """Take note, after training step ``step``, of a plan that was made in it."""
        plan, seen = self.plan, self._seen
        if plan is seen:
            return
        self._seen = plan
        if plan is not None and (seen is None or plan.choices() != seen.choices()):
            self._step, self._is_told = step, False

    @property
    def plan(self) -> Plan | None:
        """The plan that the model runs now, None before there is one."""
        session = session_of(self._model)
        return session.plan if session is not None else None

    @property
    def plan_step(self) -> int:
        """The training step in which the plan was made."""
        return self._step

    @property
    def never_ran(self) -> bool:
        """Whether no call of the compiled model has come by since there is one."""
        session = session_of(self._model)
        return session is not None and session.config.budget_bits is not None and not session.rewritten

    def figures(self) -> dict[str, float]:
        """Bytes, noise and the step of a plan, once a step has run by it; empty where they were given before."""
        session = session_of(self._model)
        if self._is_told or session is None or session.plan is None or not session.graphs:
            return {}
        self._is_told = True
        assert self._model is not None
        report, plan = inspect(self._model), session.plan
        found: dict[str, float] = {
            "gact_fx/bytes_before": report.bytes_before,
            "gact_fx/bytes_after": report.bytes_after,
            "gact_fx/plan_step": self._step,
        }
        if plan.variance is not None:
            found["gact_fx/noise_variance"] = plan.variance
            if plan.minibatch_variance:
                found["gact_fx/noise"] = plan.variance / plan.minibatch_variance
        return found


def _check_budget(plan: Plan, config: Config) -> None:
    if is_schedule(config.budget_bits):
        return
    if plan.budget_bits is not None and config.budget_bits not in (None, plan.budget_bits):
        log.warning(
            "training goes on with the plan of the checkpoint, which was made for budget_bits=%g; budget_bits=%g does "
            "nothing. Leave it out, or take the plan out of the checkpoint to plan anew",
            plan.budget_bits, config.budget_bits,
        )  # fmt: skip
