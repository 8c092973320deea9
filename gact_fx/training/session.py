"""One compiled model: its configuration, its plan, and the graphs seen so far."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gact_fx.breaks.eager_regions import EagerRegions
from gact_fx.config import Config
from gact_fx.graphs.aot import JointGraph
from gact_fx.passes import PIPELINE
from gact_fx.passes.encodings import GraphAnalysis
from gact_fx.passes.pipeline import Context, Pass
from gact_fx.plan import GraphPlan, Plan, graph_fingerprint
from gact_fx.planning.budget import choose_plan, is_better
from gact_fx.planning.graph_profile import GraphProfile
from gact_fx.profiling.gradients import are_finite, squared_norm
from gact_fx.profiling.measure_step import measure_step
from gact_fx.profiling.recorder import LeafGradients
from gact_fx.profiling.tape import Step
from gact_fx.training.rewrite import RewrittenGraph, graph_plan, profiling_plan, rewrite
from gact_fx.training.run_counts import RunCounts

log = logging.getLogger("gact_fx")
# Steps in training until a plan is made without knowing how much the gradient varies.
MAX_STEPS_WAITED = 8
# Steps in training that may fail to be profiled before the first plan is given up.
MAX_FAILURES = 3
# A compiled model's attribute that holds its session.
ATTRIBUTE = "_gact_fx_session"


class Session:
    """State of one compiled model, from the first sample to the running plan.

    The functions in ``on_plan`` are called whenever a plan is made, those in ``on_failure`` if there will be none.
    """

    passes: tuple[Pass, ...] = PIPELINE

    def __init__(self, config: Config, model: str = "", plan: Plan | None = None) -> None:
        self.config = config
        self.model = model
        self.plan = plan
        self.plan_was_given = plan is not None
        self.profiles: dict[str, GraphProfile] = {}
        self.records: list[RewrittenGraph] = []
        self.run_counts = RunCounts()
        self.eager_regions: EagerRegions | None = None
        # Variance of the minibatch gradient, in units of squared gradient; None until it was measured.
        self.minibatch_variance: float | None = None
        self.progress: Callable[[int], None] = lambda count: None
        self.announce: Callable[[int], None] = lambda count: None
        self.on_plan: list[Callable[[], None]] = []
        self.on_failure: list[Callable[[], None]] = []
        self._last_gradients: LeafGradients = {}
        self._steps_waited = 0
        self._failures = 0
        self.has_failed = False
        # Whether what runs now counts as a step of training, and what is to be done with a step that was measured.
        self.in_step = True
        # Whether the parameters are there only while forward and backward read them (``fully_shard``).
        self.is_sharded = False
        self.on_sample: Callable[[], object] = self.make_plan

    # Profiling

    def measure(self, steps: Sequence[Step]) -> bool:
        """Add the sensitivities of one training step to the profiles; False where its gradients are not finite."""
        if not all(step.is_finite for step in steps):
            log.warning("the sample step has NaN or infinity in its gradients; sampling another one")
            return False
        profiles = [self._profile(step.analysis) for step in steps]
        for profile in profiles:
            profile.runs = max(profile.runs, sum(other is profile for other in profiles))
        if not self.config.adaptive:
            return True
        self.announce(sum(len(step.analysis.quantized()) for step in steps))
        measured = measure_step(steps, self.config, self.progress)
        for profile, step, sensitivities in zip(profiles, steps, measured, strict=True):
            profile.add(step.analysis, sensitivities)
        return True

    def learn_from(self, steps: Sequence[Step], gradients: LeafGradients) -> None:
        """Profile a step of training: make the plan, or make it anew where the bits would change.

        Without ``steps``, it is one that ran the plan right before a step to profile; its gradients are remembered.
        """
        last, self._last_gradients = self._last_gradients, {}
        if not are_finite(gradients.values()):
            if steps:
                log.warning("the sample step has NaN or infinity in its gradients; sampling another one")
            return
        self._last_gradients = gradients
        if not steps:
            return
        # Inputs that want a gradient are other tensors in every step.
        common = [leaf for leaf in gradients if leaf in last]
        if common:
            squares = sum(squared_norm(last[leaf] - gradients[leaf]) for leaf in common)
            # The step before had the noise of the plan's codes, this one next to none.
            noise = self.plan.variance if self.plan is not None and self.plan.variance is not None else 0.0
            self.minibatch_variance = max((squares - noise) / 2, 0.0)
        # How the gradient varies takes two steps in a row; the first plan only waits for it where it is asked for.
        elif self.plan is None and self.config.max_gradient_noise is not None:
            self._steps_waited += 1
            if self._steps_waited < MAX_STEPS_WAITED:
                return
            log.warning(
                "max_gradient_noise=%g cannot be kept: of %d steps, no two in a row had gradients of the same "
                "parameters, which would tell how much they vary; planning for budget_bits=%g instead",
                self.config.max_gradient_noise, self._steps_waited, self.config.budget_bits,
            )  # fmt: skip
            self.config = replace(self.config, max_gradient_noise=None)
        self._last_gradients = {}
        known, self.profiles = self.profiles, {} if self.plan is not None else dict(self.profiles)
        try:
            if self.measure(steps) and self.profiles:
                self.on_sample()
        except BaseException as error:
            self.profiles = known
            self._report_failure(error)
            if not isinstance(error, Exception):
                raise

    def _report_failure(self, error: BaseException) -> None:
        """Say that a step of training could not be profiled, and how training goes on."""
        # Out of memory may be a matter of one batch; what fails again and again costs time in every step.
        self._failures += isinstance(error, Exception)
        gives_up = self.plan is None and self._failures >= MAX_FAILURES
        outcome = "training goes on uncompressed" if gives_up else "the next step is profiled instead"
        if self.plan is not None:
            outcome = "training goes on with the plan it has"
        lines = str(error).strip().splitlines() or [""]
        log.warning("profiling a training step failed with %s: %s; %s", type(error).__name__, lines[0], outcome)
        if gives_up:
            self.give_up()

    def give_up(self) -> None:
        """Train uncompressed from now on."""
        self.has_failed = True
        for call in self.on_failure:
            call()

    def eager_nbytes(self) -> int:
        """What eager regions held for backward in the latest step, in bytes."""
        return sum(tensor.bytes_after for tensor in self.eager_regions.latest) if self.eager_regions is not None else 0

    def make_plan(self, eager_nbytes: int | None = None) -> Plan:
        """Allocate bits over all profiled graphs together, and run the plan from now on.

        ``eager_nbytes`` come off ``budget_bytes``; None: what this process's eager regions hold.
        """
        graphs, config = [profile.tensors() for profile in self.profiles.values()], self.config
        if config.budget_bytes is not None:
            taken = self.eager_nbytes() if eager_nbytes is None else eager_nbytes
            config = replace(config, budget_bytes=max(config.budget_bytes - taken, 1))
        plan = choose_plan(graphs, config, self.model, self.minibatch_variance)
        before = self.plan
        if before is not None and not is_better(plan, before, graphs):
            self.plan = replace(before, minibatch_variance=plan.minibatch_variance)
            return self.plan
        # A given plan that was made anew may meet graphs that it does not know, like any other.
        self.plan_was_given = False
        return self.adopt(plan)

    def adopt(self, plan: Plan) -> Plan:
        """Run ``plan`` from now on."""
        self.plan = plan
        self.records, self.run_counts = [], RunCounts()
        if self.eager_regions is not None:
            self.eager_regions.shares_of_runs.clear()
        total = sum(len(graph.tensors) for graph in plan.graphs)
        log.info("planned %d saved tensors in %d graphs", total, len(plan.graphs))
        if not total:
            log.warning("nothing to compress: no saved tensor is eligible; gact_fx.inspect(model) gives the reasons")
        for call in self.on_plan:
            call()
        return plan

    # Compiling

    def rewrite(self, joint: JointGraph, *, profiling: bool = False) -> RewrittenGraph:
        """Rewrite ``joint`` by the plan (or all at the profiling width), and record it."""
        find_plan = self._profiling_plan if profiling else self._graph_plan
        context = Context(self.config, find_plan, is_profiling=profiling, keeps_text=not profiling)
        graph = rewrite(joint, context, self.passes)
        if self.config.swap and not profiling and not self.records and not graph.swapped:
            log.warning(
                "swap=True does nothing here: it moves codes from a CUDA device to host memory, and none of these "
                "codes is on one (those of the CPU are in host memory already)"
            )
        if not profiling:
            self.records.append(graph)
        return graph

    def cache_key(self) -> str:
        """Identifies what a rewritten graph depends on, beside the graph itself."""
        return hashlib.sha256(repr((self.config, self.plan)).encode()).hexdigest()

    def _profile(self, analysis: GraphAnalysis) -> GraphProfile:
        """The profile of the graph that saves what ``analysis`` says, new or known."""
        return self.profiles.setdefault(graph_fingerprint(analysis.saved), GraphProfile(analysis))

    def _profiling_plan(self, analysis: GraphAnalysis) -> GraphPlan:
        return profiling_plan(analysis, self.config)

    def _graph_plan(self, analysis: GraphAnalysis) -> GraphPlan:
        must_fit = self.plan_was_given and not self.records
        return graph_plan(analysis, self.plan, self.config, must_fit=must_fit)

    # The plan is worth copying and saving with a model; compiled graphs are not.

    def __reduce__(self) -> tuple[Any, ...]:
        return Session, (self.config, self.model, self.plan)
