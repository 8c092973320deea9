"""Budgets of bits that change in the course of training."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gact_fx.errors import UsageError
from gact_fx.options import bits_at
from gact_fx.training.lifecycle import State
from gact_fx.training.progress import say
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
            self._set(bits)
        # Where there is no plan yet, or a step to measure is due, the next plan has the new budget. That step may fail.
        if self._session.has_new_budget and self._session.lifecycle.state is State.PLANNED:
            self._plan()

    def _set(self, bits: float) -> None:
        session = self._session
        say(f"{session.title}: budget_bits={bits:g} from now on")
        session.config, session.has_new_budget = replace(session.config, budget_bits=bits), True
        if session.eager_regions is not None:
            session.eager_regions.bits = session.config.eager_bits

    def _plan(self) -> None:
        """Plan from what the present plan was made from, or where that was given have the next step profiled.

        Ranks that train together have made their plan from the same, and make the same one.
        """
        session = self._session
        profiles, eager = session.planned_from
        if not profiles:
            session.profile_next()
            return
        session.profiles, session.has_new_budget = profiles, False
        session.adopt(session.choose(eager))
