"""One compiled model: its configuration, its plan, and the graphs seen so far."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gact_fx.breaks.eager_bytes import EagerBytes
from gact_fx.breaks.eager_regions import EagerRegions
from gact_fx.config import Config
from gact_fx.graphs.aot import JointGraph
from gact_fx.graphs.step_memory import NOTHING, PairMemory
from gact_fx.options import bits_at
from gact_fx.passes import PIPELINE
from gact_fx.passes.graph_analysis import GraphAnalysis
from gact_fx.passes.pipeline import Context, Pass
from gact_fx.plan import GraphPlan, Plan, graph_fingerprint
from gact_fx.planning.budget import GraphTensors, is_better
from gact_fx.planning.choose_step_plan import choose_step_plan, why_above_budget
from gact_fx.planning.graph_profile import GraphProfile, completed, merged
from gact_fx.profiling.measure_step import measure_step
from gact_fx.profiling.recorder import Recordings
from gact_fx.profiling.tape import Step
from gact_fx.training.check_plan import MeasuredStep, check_plan
from gact_fx.training.lifecycle import Lifecycle, State
from gact_fx.training.progress import profiling_bar, say, say_planned, sizes
from gact_fx.training.rewrite import RewrittenGraph, graph_plan, profiling_plan, rewrite
from gact_fx.training.run_counts import RunCounts
from gact_fx.training.sample import Sample

log = logging.getLogger("gact_fx")
# Steps that are profiled because the plan was made without a graph that they run.
MOST_AFTERTHOUGHTS = 3


class Session:
    """What is known of one compiled model, from the first sample to the running plan; `lifecycle` says what it runs."""

    passes: Sequence[Pass] = PIPELINE

    def __init__(
        self,
        config: Config,
        model: str = "",
        plan: Plan | None = None,
        eager_regions: EagerRegions | None = None,
        title: str = "the model",
    ) -> None:
        # What messages call the model.
        self.title = title
        self.config = replace(config, budget_bits=bits_at(config.budget_bits, 0))
        self.model = model
        self.plan = plan
        self.plan_was_given = plan is not None
        self.profiles: dict[str, GraphProfile] = {}
        self.graphs: list[RewrittenGraph] = []
        # The fingerprints of all graphs that were rewritten, those for profiling included.
        self.rewritten: list[str] = []
        # What profiled graphs have in memory, and would have under plain torch.compile, by their fingerprints.
        self._memories: dict[str, tuple[PairMemory, PairMemory]] = {}
        self.eager_regions = eager_regions
        self.run_counts = RunCounts(eager_regions)
        # Variance of the minibatch gradient, in units of squared gradient; None until it was measured.
        self.minibatch_variance: float | None = None
        # The squared norm of the minibatch gradient that was seen last.
        self.squared_norm: float | None = None
        state = State.PROFILING if plan is None else State.PLANNED
        self.lifecycle = Lifecycle(State.UNCOMPRESSED if config.budget_bits is None else state)
        # Has the next step profiled, where the model can.
        self.profile_next: Callable[[], None] = lambda: None
        # Learns from a step that was recorded and waits for that.
        self.settle: Callable[[], None] = lambda: None
        self._afterthoughts = 0
        # Whether large graphs may be traced with rows that vary, and profiled on a few of them.
        self.profiles_few_rows = config.dynamic is None
        # The graphs that ran backward since there is the present plan, or since one ran that it was made without.
        self._running: set[str] = set()
        # Whether a step was measured that nobody has planned from, and whether that is for all ranks together to do.
        self._has_sample = False
        self._is_among_ranks = False
        # What the present plan was made from, and whether there is another budget by now (`BitSchedule`).
        self.planned_from: tuple[dict[str, GraphProfile], EagerBytes | None] = {}, None
        self.has_new_budget = False

    def twin(self, passes: Sequence[Pass], **changes: Any) -> "Session":
        """A session that rewrites by the same plan, with ``changes`` to the configuration, and has seen no graph."""
        regions = None if self.eager_regions is None else self.eager_regions.twin()
        found = Session(replace(self.config, **changes), self.model, self.plan, regions)
        found.passes, found.plan_was_given = passes, self.plan_was_given
        return found

    def rewrite(self, joint: JointGraph, *, profiling: bool = False) -> RewrittenGraph:
        """Rewrite ``joint`` by the plan (or all at the profiling width), and keep it."""

        def find_plan(analysis: GraphAnalysis) -> GraphPlan:
            if profiling:
                return profiling_plan(analysis, self.config)
            must_fit = self.plan_was_given and not self.graphs
            return graph_plan(analysis, self.plan, self.config, must_fit=must_fit)

        context = Context(self.config, find_plan, is_profiling=profiling, keeps_text=not profiling)
        graph = rewrite(joint, context, self.passes)
        self.rewritten.append(graph.plan.fingerprint)
        if profiling:
            self._memories.setdefault(graph.plan.fingerprint, (graph.memory, graph.plain))
            return graph
        if self.config.swap and not self.graphs and not graph.swapped:
            log.warning(
                "%s: swap=True does nothing here: it moves codes from a CUDA device to host memory, and none of these "
                "codes is on one (those of the CPU are in host memory already); leave it out", self.title,
            )  # fmt: skip
        self.graphs.append(graph)
        return graph

    def is_unforeseen(self, graph: RewrittenGraph) -> bool:
        """Whether the plan was made without ``graph``."""
        if self.plan is None or self.plan_was_given or not graph.analysis.quantized():
            return False
        return self.plan.graph(graph.plan.fingerprint) is None

    def runs_backward(self, graph: RewrittenGraph) -> None:
        """Take note that a graph runs backward by the plan; one that is unforeseen has the next step profiled."""
        if self.is_unforeseen(graph) and graph.plan.fingerprint not in self._running:
            # What ran before may not run any more: the model may have changed from evaluation to training.
            self._running.clear()
        elif not self._running:
            say(f"{self.title}: training by the plan, in {len(self.graphs)} compiled graphs")
            self._compare_peak()
        self._running.add(graph.plan.fingerprint)
        self.profile_unforeseen()

    def _compare_peak(self) -> None:
        if self.plan is not None and not self.plan_was_given:
            memories = [(each.plan.fingerprint, each.memory) for each in self.graphs]
            if why := why_above_budget(self.profiles, self.config, self.plan, memories, self.eager_bytes()):
                log.warning("%s: %s", self.title, why)

    def profile_unforeseen(self) -> None:
        """Have the next step profiled if the plan lacks a graph that runs; among ranks that is for all to decide."""
        if self.lifecycle.state is State.PLANNED and not self._is_among_ranks:
            self.profile_lacking(self.running())

    def running(self) -> frozenset[str]:
        """The fingerprints of the graphs that run by a plan that was not given, and have something to compress."""
        graphs = () if self.plan_was_given else self.graphs
        return frozenset(g.plan.fingerprint for g in graphs if g.analysis.quantized()) & self._running

    def profile_lacking(self, running: frozenset[str]) -> bool:
        """Whether the plan lacks any of these graphs, so that the next step is profiled; at most three times."""
        known = {graph.fingerprint for graph in self.plan.graphs} if self.plan is not None else running
        if running <= known or self._afterthoughts == MOST_AFTERTHOUGHTS:
            return False
        self._afterthoughts += 1
        # Traced with rows that vary, it was another graph.
        self.profiles_few_rows = False
        say(f"{self.title}: the plan was made without a graph that runs now; the next step is profiled")
        self.profile_next()
        return True

    def measure(self, steps: Sequence[Step], bar: Any = None) -> MeasuredStep | None:
        """Add the sensitivities of one training step to the profiles; None where its gradients are not finite."""
        if not all(step.is_finite for step in steps):
            log.warning("%s: the sample step has NaN or infinity in its gradients; sampling another one", self.title)
            return None
        if not self.profiles:
            count = sum(len(step.analysis.quantized()) for step in steps)
            say(f"{self.title}: profiling {count} saved tensors in {len(steps)} graphs")
        profiles = []
        for step in steps:
            key = graph_fingerprint(step.analysis.saved)
            memory, plain = self._memories.get(key, (NOTHING, NOTHING))
            new = GraphProfile(step.analysis, memory=memory, plain=plain)
            profiles.append(self.profiles.setdefault(key, new))
        for profile in profiles:
            profile.runs = max(profile.runs, sum(other is profile for other in profiles))
        bends = any(how.bends for step in steps for _, how in step.analysis.quantized())
        if not self.config.adaptive and not bends:
            return MeasuredStep(steps, [{} for _ in steps])
        if bar is not None:
            bar.total += sum(len(step.analysis.quantized()) for step in steps)
            bar.refresh()
        measured = measure_step(steps, self.config, bar.update if bar is not None else lambda count: None)
        for profile, step, sensitivities in zip(profiles, steps, measured, strict=True):
            profile.add(
                step.analysis, {name: found.of_whole_batch(step.weight) for name, found in sensitivities.items()}
            )
        return MeasuredStep(steps, measured)

    def check(self, latest: MeasuredStep | None) -> None:
        """Try the plan that the profiles lead to on the step that was measured last.

        Where parameters are sharded, all of their gradients would not fit, and where backward has collectives, ranks
        would not agree on how often it runs: there the plan is not tried.
        """
        if latest is None or not any(latest.sensitivities):
            return
        if all(s.is_finite and s.outputs is not None and not s.has_collectives for s in latest.steps):
            check_plan(latest, self.profiles, lambda: self.choose(warns=False), self.config.seed)

    def learn(
        self, recordings: Recordings, minibatch_variance: float | None = None, squared_norm: float | None = None
    ) -> None:
        """Profile a step of training: make the plan, or make it anew where the bits would change.

        ``minibatch_variance``, where it is known, takes the place of what was; ``squared_norm`` is that of the step's
        gradient. A failure leaves the profiles alone.
        """
        self.squared_norm = squared_norm
        if minibatch_variance is not None:
            self.minibatch_variance = minibatch_variance
        known, self.profiles = self.profiles, {} if self.plan is not None else merged([self.profiles])
        try:
            measured = None
            with profiling_bar() as bar:
                for recording in recordings:
                    measured = None  # what was recorded of some rows must not be there while others are
                    measured = self.measure(recording(), bar)
                    if measured is None:
                        break
            if measured is None or not self.profiles:
                self.profiles = known
                return
            if not self._is_among_ranks:
                # Not every graph runs in every step. What all ranks together know is not one rank's to bring again.
                self.profiles = completed(self.profiles, known, self._running)
                self._running |= self.profiles.keys()
            self.check(measured)
            self._has_sample = True
            if not self._is_among_ranks:
                self.make_plan()
        except BaseException:
            self.profiles = known
            raise

    def eager_bytes(self) -> EagerBytes:
        """What eager regions held for backward in the latest step."""
        tensors = self.eager_regions.latest if self.eager_regions is not None else ()
        return EagerBytes.of(tensors, self.config.budget_bits)

    def sample(self, is_first: bool) -> Sample:
        """What this rank brings to a meeting of all; from the first one on, none plans on its own."""
        self._is_among_ranks = True
        # All are to count alike.
        self._afterthoughts *= not is_first
        return Sample(
            self.profiles if is_first or self._has_sample else {}, self.eager_bytes(),
            self.minibatch_variance, self.squared_norm, self.config.max_gradient_noise,
            self.plan if is_first else None, self.lifecycle.state is State.FAILED, self.running(),
        )  # fmt: skip

    def make_plan(self, eager: EagerBytes | None = None) -> bool:
        """Allocate bits over all profiled graphs together and run the plan; False where the one there is does as well.

        What ``eager`` regions hold counts for the budget; None: those of this process.
        """
        plan, before, is_asked_for = self.choose(eager), self.plan, self.has_new_budget
        self.planned_from = self.profiles, eager
        self._has_sample = self.has_new_budget = False
        if before is not None and not is_asked_for and not is_better(plan, before, self._tensors(), self.config):
            self.plan = replace(before, minibatch_variance=plan.minibatch_variance)
            return False
        # A given plan that was made anew may meet graphs that it does not know, like any other.
        self.plan_was_given = False
        self.adopt(plan)
        return True

    def choose(self, eager: EagerBytes | None = None, *, warns: bool = True) -> Plan:
        """The plan that the profiles lead to."""
        return choose_step_plan(
            self.profiles, self.config, self.model, self.minibatch_variance, eager or self.eager_bytes(),
            squared_norm=self.squared_norm, warns=warns,
        )  # fmt: skip

    def _tensors(self) -> list[GraphTensors]:
        return [profile.tensors() for profile in self.profiles.values()]

    def predicted_sizes(self) -> str:
        """What is held for backward without the plan and with it, '' where that is not known."""
        return sizes(self.plan, self._tensors()) if self.plan is not None else ""

    def adopt(self, plan: Plan) -> None:
        """Run ``plan`` from now on."""
        self.plan, self._has_sample = plan, False
        self.graphs, self.run_counts, self._running = [], RunCounts(self.eager_regions), set()
        if self.eager_regions is not None:
            # There are other graphs now, which may hold other activations first.
            self.eager_regions.shares_of_runs.clear()
        say_planned(self.title, plan, self._tensors())
        self.lifecycle.planned()

    # The plan is worth copying and saving with a model; compiled graphs are not.

    def __reduce__(self) -> tuple[Any, ...]:
        return Session, (self.config, self.model, self.plan)
