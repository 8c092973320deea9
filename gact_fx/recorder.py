"""Watches a model's graphs run, and records whole training steps on a tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gact_fx.aot import GraphPair
from gact_fx.inner import Compiled, boxed
from gact_fx.records import GraphAnalysis
from gact_fx.tape import Step, Tape


class Recorder:
    """Hands every ``every``-th training step, and those that follow it up to ``consecutive``, to ``on_step``: the
    backward passes of its graphs and its gradients.

    A step begins when the first graph of the model runs forward, and ends when every graph that ran forward has run
    backward, or else when the next one begins. With ``every`` 1 all steps are recorded; with ``every`` None none, until
    `start` is called, and then until `take`.
    """

    def __init__(
        self, on_step: Callable[[list[Step], list[torch.Tensor]], None], every: int | None = None, consecutive: int = 1
    ) -> None:
        self._on_step = on_step
        self._every = every
        self._consecutive = consecutive
        self._tape: Tape | None = None
        self._gradients: list[torch.Tensor] = []
        self._first: int | None = None
        self._begun = 0
        self._stopped = False

    def start(self) -> None:
        """Record what runs from now on."""
        self._tape, self._gradients = Tape(), []

    def take(self) -> list[Step]:
        """What was recorded since `start`; recording goes on with an empty tape."""
        steps = self._tape.steps() if self._tape is not None else []
        self.start()
        return steps

    def stop(self) -> None:
        """Record nothing any more."""
        self._tape, self._stopped = None, True

    def forward(self, run: Compiled, key: int, pair: GraphPair) -> Compiled:
        """``run``, the forward graph ``key``, watched."""

        def call(arguments: list[Any]) -> Any:
            self._enter(key)
            if self._tape is None:
                return run(arguments)
            inputs = list(arguments)
            outputs = run(arguments)
            if self._tape is not None:
                self._tape.record_forward(key, inputs, outputs[: pair.num_user_outputs])
            return outputs

        return boxed(call)

    def backward(self, run: Compiled, key: int, pair: GraphPair, analysis: GraphAnalysis) -> Compiled:
        """``run``, the backward graph ``key``, watched."""

        def call(arguments: list[Any]) -> Any:
            if self._tape is None:
                return run(arguments)
            self._tape.record_backward(key, pair, analysis, arguments)
            result = run(arguments)
            if self._every is not None and self._tape is not None:
                # Copies: what is returned becomes .grad, which the next step may add to in place.
                self._gradients += [g.detach().clone() for g in result if isinstance(g, torch.Tensor)]
                if self._tape.is_complete:
                    self._finish()
            return result

        return boxed(call)

    def _enter(self, key: int) -> None:
        if self._every is None or self._stopped:
            return
        # A graph whose outputs the loss ignored never runs backward; it is not waited for for ever.
        if self._tape is not None and self._tape.ran_forward(key) and self._tape.has_gradients:
            self._finish()
        if self._first is None:
            self._first = key
        if key == self._first and not self._stopped:
            self._begun += 1
            is_sampled = self._begun >= self._every and self._begun % self._every < self._consecutive
            if self._tape is None and is_sampled:
                self.start()

    def _finish(self) -> None:
        assert self._tape is not None
        steps, gradients = self._tape.steps(), self._gradients
        self._tape, self._gradients = None, []
        if steps:
            self._on_step(steps, gradients)
