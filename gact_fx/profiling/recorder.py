"""Watches a model's graphs run, and records whole training steps on a tape."""

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.compilers import Compiled, boxed
from gact_fx.graphs.dynamo import in_backward
from gact_fx.graphs.hooks import caller_has_hooks
from gact_fx.passes.graph_analysis import GraphAnalysis
from gact_fx.profiling.few_rows_step import FewRowsStep
from gact_fx.profiling.gradients import are_finite, sketch
from gact_fx.profiling.narrow_codes import narrowed
from gact_fx.profiling.tape import MAX_WAITING, Step, Tape, with_copies

log = logging.getLogger("gact_fx")
T = TypeVar("T")
# The sketch of what a step adds to the gradient of every leaf that its graphs read, by the leaf itself.
LeafGradients = Mapping[torch.Tensor, torch.Tensor]
# Each gives the backward passes of a step's graphs, or those of some of its rows.
Recordings = Sequence[Callable[[], list[Step]]]


@dataclass(eq=False, repr=False)
class Recorder:
    """Hands every ``every``-th training step to ``on_step``: the backward passes of its graphs, or of some rows after
    others, and the gradients of its leaves; what that gives says whether it went well. Of the steps right before it, so
    that there are ``consecutive``, it hands over the gradients alone.

    A step begins with the first graph that runs forward after the last step, and ends when every graph that ran forward
    has run backward, or else when one of them runs forward again after a backward pass. With ``every`` 1 all steps are
    recorded; with ``every`` None none, until `start` is called, and then until `take`. ``on_next`` hears in every
    step's first backward pass whether the next step is an ``every``-th one. Forward passes begin no step while
    ``counts()`` is False. ``copies()``: whether parameters are gone after backward, so that they are to be copied.
    ``narrow_bits``: the width of codes in a step of which a few rows are kept; its graphs run operator by operator.
    """

    on_step: Callable[[Recordings, LeafGradients], bool]
    every: int | None = None
    consecutive: int = 1
    on_next: Callable[[bool], None] = lambda is_due: None
    counts: Callable[[], bool] = lambda: True
    copies: Callable[[], bool] = lambda: False
    narrow_bits: int | None = None
    _tape: Tape | None = field(default=None, init=False)
    _gradients: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict, init=False)
    # Of the present step: by graph, forward passes that wait for backward, and whether any ran backward.
    _waiting: dict[Hashable, int] = field(default_factory=dict, init=False)
    _has_gradients: bool = field(default=False, init=False)
    _begun: int = field(default=0, init=False)
    _is_due: bool = field(default=False, init=False)
    # Whether `record_next` asked for the present step, or the next one.
    _is_asked_for: bool = field(default=False, init=False)
    _stopped: bool = field(default=False, init=False)
    # Of a step, a few rows instead of the tape; and whether that did not do.
    _few_rows: FewRowsStep = field(default_factory=FewRowsStep, init=False)
    _is_whole: bool = field(default=False, init=False)
    # By graph, forward with codes of ``narrow_bits``, and backward for as long as anybody may run it behind that.
    _narrowed: WeakKeyDictionary[Any, tuple[Compiled, Compiled]] = field(default_factory=WeakKeyDictionary, init=False)
    # Whether the tape lacks a run of the present step.
    _is_partial: bool = field(default=False, init=False)
    _pending: tuple[FewRowsStep, LeafGradients] | None = field(default=None, init=False)
    _has_warned: bool = field(default=False, init=False)

    def start(self, *, is_due: bool = True) -> None:
        """Record what runs from now on; ``is_due``: to be profiled."""
        # Sharded parameters are not there in forward of the graphs behind them.
        self._tape, self._gradients = Tape(follows=is_due and not self.copies()), {}
        self._few_rows, self._is_due, self._is_partial = FewRowsStep(), is_due, False

    def take(self) -> list[Step]:
        """What was recorded since `start`; recording goes on with an empty tape."""
        steps = self._steps()
        self.start()
        return steps

    def record_next(self) -> None:
        """Record the next step, as if it were an ``every``-th one, unless one is being recorded."""
        assert self.every is not None
        if self._tape is None:
            self._begun, self._is_asked_for = self.every - 1, True

    def restart(self) -> None:
        """Count steps from the next one on."""
        self._begun = 0

    def stop(self) -> None:
        """Record nothing any more."""
        self._tape, self._pending, self._few_rows, self._stopped = None, None, FewRowsStep(), True

    def forward(
        self,
        run: Compiled,
        key: Hashable,
        pair: GraphPair,
        analysis: GraphAnalysis,
        running: GraphPair | None = None,
    ) -> Compiled:
        """``run``, the forward graph ``key``, watched; ``running`` is the pair that runs, where ``pair`` is a copy."""

        def call(arguments: list[Any]) -> Any:
            # Checkpointing around the graph runs it again, and its first run stands for both.
            if in_backward() and self._waiting.get(key):
                return run(arguments)
            self._enter(key, pair.repeats.calls)
            inputs = list(arguments) if self._tape is not None else []
            with self._abandoning():
                is_cut = self._tape is not None and self._cut(key, pair, analysis, inputs)
                # Checkpointing, which runs forward again, compares what it saves then.
                bits = self.narrow_bits if is_cut and not caller_has_hooks() else None
                if bits is not None and key not in self._narrowed:
                    self._narrowed[key] = narrowed(running or pair, analysis, bits)
                outputs = (run if bits is None else self._narrowed[key][0])(arguments)
            if is_cut:
                self._few_rows.ran(key, outputs[: pair.num_user_outputs])
            elif self._tape is not None:
                self._tape.record_forward(key, inputs, outputs[: pair.num_user_outputs], pair.repeats.calls)
            return outputs

        return boxed(call)

    def noting_results(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, a compiled graph as the model calls it, noting the nodes that autograd has given its results."""

        def call(*arguments: Any) -> Any:
            results = run(*arguments)
            self._few_rows.note_results()
            return results

        return call

    def backward(self, run: Compiled, key: Hashable, pair: GraphPair, analysis: GraphAnalysis) -> Compiled:
        """``run``, the backward graph ``key``, watched."""

        def call(arguments: list[Any]) -> Any:
            inputs: Sequence[Any] = []
            if self._few_rows:
                found = self._tried(lambda: self._few_rows.begin_backward(key, arguments))
                if found is None:
                    # Nothing was kept of the run that has its backward pass now.
                    self._record_whole()
                inputs = found or []
            elif self._tape is not None:
                lasting = with_copies(pair, analysis, arguments) if self.copies() else arguments
                inputs = self._tape.record_backward(key, pair, analysis, lasting)
            with self._abandoning():
                result = (self._narrowed[key][1] if key in self._narrowed else run)(arguments)
            if self._few_rows:
                self._tried(lambda: self._few_rows.end_backward(key, result))
            elif self._tape is not None:
                self._tape.record_results(key, result)
            if self.every is None:
                return result
            if self._tape is not None:
                self._collect(pair, inputs, result)
            if not self._has_gradients and not self._stopped:
                self.on_next((self._begun + 1) % self.every == 0)
            self._leave(key)
            return result

        return boxed(call)

    def _cut(self, key: Hashable, pair: GraphPair, analysis: GraphAnalysis, inputs: Sequence[Any]) -> bool:
        """Keep a few rows of what a graph reads instead of all that it saves; whether that was done.

        Where that cannot be done for a graph of the step, the next step is recorded whole. Graphs that have had no
        backward pass yet may never have one, and give way when one of them runs again.
        """
        if self._is_whole:
            return False
        if key in self._few_rows and not self._has_gradients:
            self._few_rows = FewRowsStep()
        is_first = self._is_due and self._tape is not None and self._tape.is_empty and not self.copies()
        is_cut = is_first and not (self._few_rows and self._has_gradients)
        is_cut = is_cut and bool(self._tried(lambda: self._few_rows.add(key, pair, analysis, inputs)))
        if self._few_rows and not is_cut:
            self._record_whole()
        return is_cut

    def _enter(self, key: Hashable, calls: int) -> None:
        if self.every is None or self._stopped or not self.counts():
            return
        # A graph whose outputs the loss ignored never runs backward; it is not waited for for ever.
        if self._has_gradients and key in self._waiting:
            self._finish()
        if not self._waiting and not self._stopped:
            self._begun += 1
            if self._tape is None and (self._begun + self.consecutive - 1) % self.every < self.consecutive:
                self.start(is_due=self._begun % self.every == 0)
        self._waiting[key] = self._waiting.get(key, 0) + 1
        if self._tape is not None and self._waiting[key] == MAX_WAITING * calls + 1 and not self._has_gradients:
            log.warning(
                "a graph ran forward %d times, and gact_fx has seen no backward pass, which it samples. Within one "
                "step that is fine, and the last %d runs are measured. Put validation under torch.no_grad(); compiled "
                "autograd runs backward passes itself, and needs sample_batches or plan=",
                MAX_WAITING * calls + 1, MAX_WAITING * calls,
            )  # fmt: skip

    def _leave(self, key: Hashable) -> None:
        self._waiting[key] = max(self._waiting.get(key, 0) - 1, 0)
        self._has_gradients = True
        if not any(self._waiting.values()):
            self._finish()

    def _collect(self, pair: GraphPair, inputs: Sequence[Any], result: Any) -> None:
        for position, source in pair.gradients_of_inputs().items():
            gradient, leaf = result[position], inputs[source] if inputs else None
            if isinstance(gradient, torch.Tensor) and isinstance(leaf, torch.Tensor) and leaf.is_leaf:
                # What is returned becomes .grad, which the next step may add to in place.
                found, known = sketch(gradient), self._gradients.get(leaf)
                self._gradients[leaf] = found if known is None else known + found

    @contextlib.contextmanager
    def _abandoning(self) -> Iterator[None]:
        """Forget the step in which an exception is raised, so that the next one is recorded in its place.

        One that `record_next` asked for is given up: it may take memory that others do not need.
        """
        try:
            yield
        except BaseException as error:
            if self.every is not None and not self._stopped:
                is_given_up = self._tape is not None and self._is_asked_for
                if self._tape is not None:
                    outcome = "the plan there is stays" if is_given_up else "the next step takes its place"
                    log.warning("%s in a step that was to be profiled; %s", type(error).__name__, outcome)
                self._tape, self._gradients, self._few_rows = None, {}, FewRowsStep()
                self._waiting, self._has_gradients = {}, False
                if is_given_up:
                    self._is_asked_for = False
                    self.on_next(False)
                else:
                    self._begun -= 1
            raise

    def _finish(self) -> None:
        waits = bool(self._few_rows) and not self._is_whole
        if waits:
            self._pending, steps = (self._few_rows, self._gradients), []
        else:
            steps = self._steps()
        gradients, self._tape, self._gradients, self._few_rows = self._gradients, None, {}, FewRowsStep()
        self._waiting, self._has_gradients = {}, False
        self._is_asked_for &= not (steps or waits)
        if steps:
            is_due = self.every is None or self._begun % self.every == 0
            self.on_step([lambda: steps] if is_due else [], gradients)

    def settle(self) -> None:
        """Hand over the last step, whose rows wait until the next one: most loops have no gradients in memory then."""
        if self._pending is None or torch.is_inference_mode_enabled():
            return
        (few, gradients), self._pending = self._pending, None
        # As within backward, whatever surrounds the next call.
        with contextlib.ExitStack() as stack:
            for device_type in few.device_types:
                stack.enter_context(torch.autocast(device_type, enabled=False))
            # A step with infinite gradients is no sample (`Learner`), and its rows cannot be weighed.
            is_sample = are_finite(gradients.values())
            recordings = self._tried(lambda: few.recordings(parts=2)) if is_sample else [list]
            if recordings and not self.on_step(recordings, gradients):
                self._is_whole = True

    def _steps(self) -> list[Step]:
        few, self._few_rows = self._few_rows, FewRowsStep()
        if self._tape is None or self._is_partial:
            return []
        if few:
            return self._tried(lambda: few.recordings(parts=1)[0]()) or []
        breaks = self._tape.breaks()
        if breaks and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s, which runs between the compiled graphs: what rounding behind it does to parameters before it is "
                "not measured, and widths may be chosen poorly. Move it out of the model, or into a graph "
                '(TORCH_LOGS="graph_breaks" names the line), or give more budget_bits', "; ".join(breaks),
            )  # fmt: skip
        return self._tape.steps()

    def _tried(self, run: Callable[[], T]) -> T | None:
        """What fails in keeping or running a few rows is no failure of the step."""
        try:
            return run()
        except Exception as error:
            self._record_whole()
            log.warning(
                "profiling on a few rows failed with %s: %s; the next step is profiled whole, in more memory",
                type(error).__name__, error,
            )  # fmt: skip
            return None

    def _record_whole(self) -> None:
        """Give this step up, and record the next one whole."""
        self._is_whole, self._is_partial, self._few_rows = True, True, FewRowsStep()
