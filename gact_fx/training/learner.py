"""What is learnt from the steps of training themselves, where there were no sample batches, or to plan again."""

import logging
from dataclasses import replace

from gact_fx.errors import first_line
from gact_fx.profiling.gradients import are_finite, squared_norm
from gact_fx.profiling.recorder import LeafGradients, Recordings
from gact_fx.training.session import Session

log = logging.getLogger("gact_fx")
# Steps until a plan is made without knowing how much the gradient varies.
MAX_STEPS_WAITED = 8
# Steps that may fail to be profiled before the first plan is given up.
MAX_FAILURES = 3
# Steps in a row whose gradients may be no numbers before that; to find its scale, a GradScaler takes about ten.
MAX_NOT_FINITE = 20


class Learner:
    """Has a session learn from steps that were recorded; training goes on whatever fails in that."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last_gradients: LeafGradients = {}
        self._steps_waited = 0
        self._failures = 0
        self._not_finite = 0

    def learn_from(self, recordings: Recordings, gradients: LeafGradients) -> bool:
        """Profile a step of training; False where that failed.

        Without ``recordings``, the step ran the plan, right before one to profile.
        """
        last, self._last_gradients = self._last_gradients, {}
        if not are_finite(gradients.values()):
            if recordings:
                self._report_not_finite()
            return True
        self._not_finite = 0
        variance = self._variance(last, gradients) if recordings else None
        if not recordings or (variance is None and self._waits()):
            self._last_gradients = gradients
            return True
        is_done = True
        try:
            self._session.learn(recordings, variance, sum(map(squared_norm, gradients.values())))
        except BaseException as error:
            is_done = False
            self._report_failure(error)
            if not isinstance(error, Exception):
                raise
        # The step may have run other graphs than the one it was profiled for.
        self._session.profile_unforeseen()
        return is_done

    def _variance(self, last: LeafGradients, gradients: LeafGradients) -> float | None:
        """How much the gradients of minibatches vary, by two in a row; None where these have no leaf in common."""
        # Inputs that want a gradient are other tensors in every step.
        common = [leaf for leaf in gradients if leaf in last]
        if not common:
            return None
        squares = sum(squared_norm(last[leaf] - gradients[leaf]) for leaf in common)
        # The step before had the noise of the plan's codes, this one next to none.
        plan = self._session.plan
        noise = plan.variance if plan is not None and plan.variance is not None else 0.0
        return max((squares - noise) / 2, 0.0)

    def _waits(self) -> bool:
        """Whether the first plan has to wait for a second step in a row, as it does where noise is to be bounded."""
        bound, budget = self._session.config.max_gradient_noise, self._session.config.budget_bits
        if self._session.plan is not None or bound is None:
            return False
        self._steps_waited += 1
        if self._steps_waited < MAX_STEPS_WAITED:
            return True
        log.warning(
            "%s: max_gradient_noise=%g cannot be kept: of %d steps, no two in a row had gradients of the same "
            "parameters, which would tell how much they vary; planning for budget_bits=%g instead. Two sample_batches "
            "tell as well", self._session.title, bound, self._steps_waited, budget,
        )  # fmt: skip
        self._session.config = replace(self._session.config, max_gradient_noise=None)
        return False

    def _report_not_finite(self) -> None:
        """Say that a step says nothing; if none ever does, codes may be why, and training goes on without."""
        self._not_finite += 1
        if self._session.plan is None and self._not_finite >= MAX_NOT_FINITE:
            log.warning(
                "%s: %d steps in a row had NaN or infinity in their gradients; training goes on uncompressed. If its "
                "gradients are finite then, please report this", self._session.title, self._not_finite,
            )  # fmt: skip
            self._session.lifecycle.failed()
        else:
            title = self._session.title
            log.warning("%s: the sample step has NaN or infinity in its gradients; sampling another one", title)

    def _report_failure(self, error: BaseException) -> None:
        """Say that a step of training could not be profiled, and how training goes on."""
        # Out of memory may be a matter of one batch; what fails again and again costs time in every step.
        self._failures += isinstance(error, Exception)
        gives_up = self._session.plan is None and self._failures >= MAX_FAILURES
        outcome = "training goes on uncompressed" if gives_up else "the next step is profiled instead"
        if self._session.plan is not None:
            outcome = "training goes on with the plan it has"
        log.warning(
            "%s: profiling a training step failed with %s: %s; %s",
            self._session.title, type(error).__name__, first_line(error), outcome,
        )  # fmt: skip
        if gives_up:
            self._session.lifecycle.failed()
