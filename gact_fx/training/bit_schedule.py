"""Budgets of bits that change in the course of training."""

from collections.abc import Callable
from typing import Any

import torch

from gact_fx.errors import UsageError
from gact_fx.options import bits_at
from gact_fx.training.session import Session

# A change by less waits for more: every other plan is compiled.
LEAST_CHANGE = 0.5


class BitSchedule:
    """Gives a session the budget of every step of training, before its forward pass.

    ``counts`` says whether the pass that begins is one of a step.
    """

    def __init__(self, session: Session, schedule: Any, counts: Callable[[], bool]) -> None:
        self._session = session
        self._schedule = schedule
        self._counts = counts
        self._step = 0

    def before_call(self) -> None:
        """The model is called.

        Raises:
            UsageError: the schedule gives no bits that a budget may have.
        """
        if not torch.is_grad_enabled() or not self._counts():
            return
        bits = bits_at(self._schedule, self._step)
        for problem in self._session.config.problems_of_bits(bits) if bits is not None else ["got None"]:
            raise UsageError(f"gact_fx.compile: the schedule of budget_bits, in step {self._step}: {problem}")
        self._step += 1
        if abs(bits - self._session.config.budget_bits) >= LEAST_CHANGE:
            self._session.set_budget(bits)
        # A step that was to tell the sensitivities may have failed.
        self._session.keep_budget()
