"""Steps of training without data: what a plan would hold, and how much memory its steps would need.

The model's copy is compiled as for training, on fake tensors. First all that may be compressed gets one width, as when
a step is profiled; then there is a plan, from sensitivities that are assumed to be the same everywhere, or a measured
one. What graphs need while they run is read off the rewritten graphs; what runs between them is counted as it runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx, nn

from gact_fx.breaks.eager_regions import EagerRegions
from gact_fx.config import Config
from gact_fx.errors import StepError, UsageError, first_line
from gact_fx.graphs import recurrent_modules
from gact_fx.graphs.aot import JointGraph
from gact_fx.graphs.compilers import Compiled, boxed, without_views
from gact_fx.graphs.dynamo import compile_apart, new_code_name, own_call, set_compiled_call
from gact_fx.graphs.fake_steps import Fakes, LiveBytes, needs_values, run_fake, tensors_in
from gact_fx.graphs.live_memory import peak_nbytes
from gact_fx.graphs.step_memory import NOTHING, PairMemory
from gact_fx.graphs.tensors import storage_key
from gact_fx.passes.pipeline import Context
from gact_fx.passes.weigh_plain_cut import weigh_plain_cut
from gact_fx.plan import Plan
from gact_fx.planning.assume_sensitivity import assume_sensitivity
from gact_fx.planning.graph_profile import GraphProfile
from gact_fx.training.backend import Backend
from gact_fx.training.minibatch_variance import LossFunction
from gact_fx.training.model import owned_by
from gact_fx.training.rewrite import RewrittenGraph
from gact_fx.training.sample_batches import check_loss
from gact_fx.training.session import Session

_WHO = "gact_fx.estimate"


@dataclass(frozen=True)
class FakeStep:
    """Bytes of one planned step above what is there when it begins.

    ``peak`` is the most at a time, the ``gradients`` included that the step leaves; ``plain`` is what
    ``torch.compile`` would hold for backward. ``session`` has the graphs, and what they hold.
    """

    peak: int
    gradients: int
    plain: int
    session: Session


class FakeTraining:
    """A fake ``model`` and a fake ``batch``, both of ``fakes``, and the loss of one."""

    def __init__(self, fakes: Fakes, model: nn.Module, batch: Any, loss_fn: LossFunction, config: Config) -> None:
        self._fakes, self._model, self._batch, self._loss_fn, self._config = fakes, model, batch, loss_fn, config
        self._known = [*model.parameters(), *model.buffers(), *tensors_in(batch)]

    def step(self, plan: Plan | None = None) -> FakeStep:
        """One step by ``plan``, by default by one that is made without measuring.

        Raises:
            StepError: the step cannot be run without data, or no graph was captured.
            ValueError: a loss that is not a scalar or has no gradient.
        """
        first, plain = self._profiled(self._config)
        if plan is None:
            first.profiles = {key: _assumed(profile) for key, profile in first.profiles.items()}
            plan = first.choose(warns=False)
        session = Session(self._config, "", plan, first.eager_regions, first.title)
        meter = LiveBytes(self._known)
        self._compile(_FakeBackend(session, meter))
        # The first run traces, which is no part of a step.
        self._run()
        with meter:
            gradients = self._run(meter)
        return FakeStep(meter.peak, gradients, plain, session)

    def _profiled(self, config: Config) -> tuple[Session, int]:
        """A session with the graphs of a step, and what torch.compile would hold for backward."""
        model = self._model
        regions = EagerRegions(config.eager_bits, config.seed, config.min_elements, lambda: owned_by(model))
        session = Session(config, "", None, regions, type(model).__name__)
        backend = _FakeBackend(session, LiveBytes(self._known))
        self._compile(backend)
        self._run()
        runs = session.run_counts.last_step().graphs
        if not runs:
            raise StepError(
                f"{_WHO}: torch.compile captured no graph of this {session.title} that has a gradient, so that there "
                'is nothing to compress; TORCH_LOGS="graph_breaks" says which line to change'
            )
        for graph, found in runs.items():
            key = graph.plan.fingerprint
            session.profiles[key] = GraphProfile(
                graph.analysis, runs=found.runs, memory=graph.memory, plain=backend.plain[key]
            )
        profiles = session.profiles.values()
        plain = session.eager_bytes().plain + sum(profile.runs * profile.plain.held for profile in profiles)
        if config.split_loss and any(map(_is_split, runs)):
            # torch.compile has the logits whole.
            plain = self._profiled(Config.from_options({"split_loss": False, "inner": config.inner}))[1]
        return session, plain

    def _compile(self, backend: Backend) -> None:
        session = backend.session
        function = own_call(self._model, new_code_name())
        recurrent_modules.install(self._model.modules())
        recurrent = recurrent_modules.can_trace(self._model.modules())
        config = session.config
        options: dict[str, Any] = {"dynamic": config.dynamic, "fullgraph": config.fullgraph, "recurrent": recurrent}
        assert session.eager_regions is not None
        compiled = session.eager_regions.around(compile_apart(function, backend, **options))
        set_compiled_call(self._model, compiled)

    def _run(self, meter: LiveBytes | None = None) -> int:
        """Forward and backward; the bytes of the gradients."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        try:
            with self._fakes, torch.enable_grad():
                loss = self._loss_fn(self._model, self._batch)
                check_loss(loss)
                # Not loss.backward(): a loss function may reach other, real parameters.
                found = torch.autograd.grad(loss, parameters, allow_unused=True)
        except UsageError as error:
            raise UsageError(str(error).replace("gact_fx.compile", _WHO)) from error
        except Exception as error:
            _fail(error)
        return sum(x.untyped_storage().nbytes() for x in found if x is not None)


class _FakeBackend(Backend):
    """Runs rewritten graphs on fake tensors, and has ``meter`` take note of what they need."""

    def __init__(self, session: Session, meter: LiveBytes) -> None:
        super().__init__(session, interpreted=session.plan is None)
        self._meter = meter
        # What graphs would have in memory under torch.compile, by their fingerprints.
        self.plain: dict[str, PairMemory] = {}

    def rewrite(self, joint: JointGraph) -> RewrittenGraph:
        plain = weigh_plain_cut(joint, Context(self.session.config)) if self.session.plan is None else NOTHING
        graph = super().rewrite(joint)
        self.plain[graph.plan.fingerprint] = plain
        return graph

    def run_of(self, graph: fx.GraphModule, is_backward: bool, compile: Callable[[], Compiled]) -> Compiled:
        meter, fused = self._meter, self.session.config.inner == "inductor"
        inputs = graph.graph.find_nodes(op="placeholder")

        def run(arguments: list[Any]) -> Any:
            keys = [storage_key(x) if isinstance(x, torch.Tensor) else None for x in arguments]
            live = meter.live
            with meter.paused() as gone:
                outputs = run_fake(graph, arguments)
            freed = [node for node, key in zip(inputs, keys, strict=True) if key in gone]
            meter.reaches(live + peak_nbytes(graph.graph, freed, fused=fused))
            meter.add(outputs)
            return outputs

        return boxed(run)

    def watched(self, run: Compiled, graph: RewrittenGraph, key: object, is_backward: bool) -> Compiled:
        counts = self.session.run_counts
        if is_backward:
            return counts.backward(run, graph)
        return self.noting(counts.forward(without_views(run, graph.pair.num_user_outputs), graph), graph)


def _assumed(profile: GraphProfile) -> GraphProfile:
    """The profile of a graph that nobody has measured."""
    assumed = {tensor.name: assume_sensitivity(tensor, how) for tensor, how in profile.analysis.quantized()}
    profile.add(profile.analysis, assumed)
    return profile


def _is_split(graph: RewrittenGraph) -> bool:
    """Whether the graph computes logits some classes at a time."""
    target = torch.ops.gact_fx.linear_cross_entropy.default
    return bool(graph.pair.forward.graph.find_nodes(op="call_function", target=target))


def _fail(error: Exception) -> NoReturn:
    if isinstance(error, StepError):
        raise error
    instead = "gact_fx.compile(model, sample_batches=[batch]) and gact_fx.inspect(model) measure it instead"
    if needs_values(error):
        raise StepError(
            f"{_WHO}: the model or its loss reads values of tensors, which an estimate does not have "
            f"({first_line(error)}); {instead}"
        ) from error
    raise StepError(
        f"{_WHO}: the step failed on tensors without data, with {type(error).__name__}: {first_line(error)}. The batch "
        f"must be what loss_fn(model, batch), by default model(**batch) or model(*batch), takes; if it is, {instead}"
    ) from error
