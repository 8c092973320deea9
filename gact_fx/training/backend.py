"""The torch.compile backends: one that rewrites graphs by a session's plan, and ``backend="gact"`` on top of it."""

import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, cast

import torch
from torch import fx

from gact_fx.breaks.graph_holdings import noting_holdings
from gact_fx.config import Config
from gact_fx.errors import UsageError
from gact_fx.graphs.aot import ONCE, JointGraph, Repeats
from gact_fx.graphs.compilers import Compiled, boxed, compile_pair, interpret_in_blocks, without_views
from gact_fx.graphs.double_backward import refuse_double_backward
from gact_fx.graphs.dynamo import compile_apart, lookup_backend
from gact_fx.graphs.hooks import outside_hooks, paused
from gact_fx.graphs.late_product import LateProduct, with_late_products
from gact_fx.graphs.regions import compile_parts, cut_at_regions, inline_regions
from gact_fx.graphs.tensors import is_foreign
from gact_fx.options import is_schedule
from gact_fx.passes.split_cross_entropy import split_cross_entropy
from gact_fx.profiling.recorder import Recorder
from gact_fx.training import freed_memory
from gact_fx.training.learner import Learner
from gact_fx.training.lifecycle import State
from gact_fx.training.ranks import Ranks
from gact_fx.training.rewrite import RewrittenGraph, narrow_bits
from gact_fx.training.row_tracing import RowTracing
from gact_fx.training.session import Session

Graphs = tuple[fx.GraphModule, fx.GraphModule]


class GraphKey:
    """Identifies a graph for as long as somebody may run it."""


class Backend:
    """Rewrites graphs by the session's plan, or all at the profiling width, and compiles them.

    ``interpreted``: run them operator by operator instead, as profiling does. ``recorder`` watches them run, and
    ``rows`` may have a graph traced anew.
    """

    def __init__(
        self,
        session: Session,
        *,
        interpreted: bool = False,
        recorder: Recorder | None = None,
        rows: RowTracing | None = None,
    ) -> None:
        self.session = session
        self._interpreted = interpreted
        self._recorder = recorder
        self._rows = rows

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        return self._compile(module, example_inputs, example_inputs, ONCE)

    def _compile(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], given: Sequence[Any], repeats: Repeats
    ) -> Compiled:
        """What runs ``module``; ``given`` is what the ``example_inputs`` stand for, where these are fake."""
        session = self.session
        parts = cut_at_regions(module)
        if parts:
            # A step that runs a graph more than once is recorded whole.
            session.profiles_few_rows &= len({part.body for part in parts}) == len(parts)
            return compile_parts(module, parts, example_inputs, given, repeats, self._compile)
        if self._rows is not None and session.profiles_few_rows:
            self._rows.ask_for(module)
        found: list[RewrittenGraph] = []
        # What the recorder knows the graph by, also where it is cut in two more than once.
        key = GraphKey()
        late = self._split(module)
        # Asked now: what the compiled graph keeps alive must not hold a batch.
        upstream = _inputs_with(partial(_is_upstream, session), module, given)
        foreign = _inputs_with(is_foreign, module, given)

        def cut(
            joint: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            graph = JointGraph(joint, joint_inputs, upstream, foreign=foreign, repeats=repeats, **options)
            found.append(self.rewrite(graph))
            return found[-1].pair.forward, found[-1].pair.backward

        def watch(graph: fx.GraphModule, is_backward: bool, compile: Callable[[], Compiled]) -> Compiled:
            return self.watched(self.run_of(graph, is_backward, compile), found[-1], key, is_backward)

        if not self._interpreted:
            # What was profiled is gone by now.
            freed_memory.give_back()
        config = session.config
        patches = config.inductor_patches
        if config.swap and any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs):
            # What is fetched stays where it was put: Inductor counts host memory as memory of the device.
            patches = {"reorder_for_peak_memory": False, **patches}
        # Compiled graphs store what they save themselves.
        with paused():
            run = compile_pair(module, example_inputs, cut, inner=config.inner, patches=patches, interpret=watch)
        if self._recorder is not None:
            run = self._recorder.noting_results(run)
        if session.eager_regions is not None:
            run = session.eager_regions.watch(run)
        return refuse_double_backward(outside_hooks(with_late_products(run, late)))

    def _split(self, module: fx.GraphModule) -> list[LateProduct]:
        """Edit the model's own graph before it is differentiated."""
        config = self.session.config
        is_wanted = config.split_loss and torch.is_grad_enabled()
        return split_cross_entropy(module, loss_only=config.loss_only) if is_wanted else []

    def rewrite(self, joint: JointGraph) -> RewrittenGraph:
        """The joint graph cut in two and rewritten."""
        return self.session.rewrite(joint, profiling=self._interpreted)

    def run_of(self, graph: fx.GraphModule, is_backward: bool, compile: Callable[[], Compiled]) -> Compiled:
        """What runs a rewritten graph: operator by operator, or ``compile()``, which is from the inner compiler."""
        return interpret_in_blocks(graph) if self._interpreted else compile()

    def watched(self, run: Compiled, graph: RewrittenGraph, key: object, is_backward: bool) -> Compiled:
        """``run``, a rewritten graph, with all that watches it."""
        session, recorder = self.session, self._recorder
        if not is_backward and (self._interpreted or session.config.inner == "eager"):
            run = without_views(run, graph.pair.num_user_outputs)
        if not self._interpreted:
            run = (session.run_counts.backward if is_backward else session.run_counts.forward)(run, graph)
            if is_backward:
                run = _preceded_by(partial(session.runs_backward, graph), run)
            run = run if is_backward else self.noting(run, graph)
        if recorder is None:
            return run
        if is_backward:
            return recorder.backward(run, key, graph.replayable, graph.analysis)
        return recorder.forward(run, key, graph.replayable, graph.analysis, graph.pair)

    def noting(self, run: Compiled, graph: RewrittenGraph) -> Compiled:
        """``run``, the forward pass of ``graph``, noting what it holds that others may hold as well."""
        if self.session.eager_regions is None:
            return run
        entries = graph.plan.entries()
        crossing = [
            (tensor.boundary, (graph, tensor.name), how.nbytes(tensor, entries.get(tensor.key)) is None)
            for tensor, how in graph.analysis.pairs()
            if tensor.boundary is not None
        ]
        return noting_holdings(run, crossing, self.session.eager_regions.holdings)


def uncompressed(inner: str) -> str:
    """The backend of torch.compile that ``budget_bits=None`` stands for."""
    return {"inductor": "inductor", "eager": "aot_eager"}[inner]


def run_states(
    session: Session,
    compile: Callable[[Backend | str], Callable[..., Any]],
    ranks: Ranks,
    samples: Recorder | None = None,
) -> None:
    """Have the session's model run in every state what ``compile(backend)`` gives for the state's backend.

    The first steps of training are profiled, or where ``samples`` records them, sample batches. The steps that are
    profiled again run operator by operator as these did, at 8 bits: what the plan's codes give back lies on their grid,
    and says little about others.
    """
    every, lifecycle, learn = session.config.profile_every, session.lifecycle, Learner(session).learn_from
    counts, copies = lambda: ranks.in_step, lambda: ranks.is_sharded
    first = samples or Recorder(learn, every=1, counts=counts, copies=copies, narrow_bits=narrow_bits(session.config))
    # With the step before, whose gradient tells how much those of minibatches vary; that one runs the plan. Without
    # ``profile_every``, steps are recorded on demand alone.
    again = Recorder(learn, max(every or sys.maxsize, 2), 2, lifecycle.profile_again, counts, copies)

    def profile_next() -> None:
        again.record_next()
        lifecycle.profile_again(True)

    def settle() -> None:
        first.settle()
        again.settle()

    session.profile_next, session.settle = profile_next, settle
    lifecycle.before_calls(settle)

    def profiled(recorder: Recorder) -> Callable[..., Any]:
        rows = RowTracing()
        return rows.around(compile(Backend(session, interpreted=True, recorder=recorder, rows=rows)))

    def compiled(state: State) -> Callable[..., Any]:
        if state is State.PROFILING:
            return profiled(first)
        first.stop()
        if state is State.PROFILING_AGAIN:
            return profiled(again)
        if state is State.PLANNED:
            again.restart()
            return compile(Backend(session, recorder=again))
        return compile(uncompressed(session.config.inner))

    for recorder in (first, again):
        lifecycle.at_close(recorder.stop)
    lifecycle.run(compiled)


def gact(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """``torch.compile(model, backend="gact", options={...})``; the options are the fields of :class:`Config`.

    Every graph is its own model here: its first training step is the sample, the next one runs its plan. ``mode`` is
    that of torch.compile, which takes either it or options.

    Raises:
        ValueError: an unknown option, or one out of its range.
    """
    config = Config.from_options({"mode": mode, **(options or {})})
    if is_schedule(config.budget_bits):
        raise UsageError("gact_fx.compile: beside backend='gact', give a number of budget_bits, not a schedule")
    for name in ("dynamic", "fullgraph"):
        if getattr(config, name) != getattr(Config, name):
            raise UsageError(f"gact_fx.compile: beside backend='gact', give {name} to torch.compile itself")
    if config.budget_bits is None or not torch.is_grad_enabled():
        compiler = lookup_backend(uncompressed(config.inner))
        changes = {"config_patches": config.inductor_patches} if config.inner == "inductor" else {}
        return cast(Compiled, compiler(module, list(example_inputs), **changes))
    # Dynamo, which traces the graph again, would take no calls of regions that it has traced already.
    inline_regions(module)
    session = Session(config, title="a graph of backend='gact'")
    # The first one is compiled where Dynamo asks for it; the inputs of that call are not to outlive it.
    at_once = [(fx.GraphModule(module, copy.deepcopy(module.graph)), example_inputs)]
    generations = count(0)

    def compile(backend: Backend | str) -> Callable[..., Any]:
        generation = next(generations)
        if isinstance(backend, Backend) and at_once:
            return backend(*at_once.pop())
        return compile_apart(module, backend, generation=generation)

    run_states(session, compile, Ranks(session, ()))

    def run(*arguments: Any) -> Any:
        return session.lifecycle.current()(*arguments)

    # Dynamo must not trace the choice itself.
    return cast(Compiled, torch.compiler.disable(run, recursive=False))


def _preceded_by(call: Callable[[], None], run: Compiled) -> Compiled:
    """``run``, with ``call()`` before every run."""

    def both(arguments: list[Any]) -> Any:
        call()
        return run(arguments)

    return boxed(both)


def _inputs_with(
    what: Callable[[object], bool], module: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[[int], bool]:
    """Whether ``what`` holds of flat input i."""
    # Parameters that Dynamo left inside the module come first among AOTAutograd's inputs.
    offset = len(list(module.parameters())) + len(list(module.buffers()))
    flags = [what(x) for x in example_inputs]
    return lambda index: 0 <= index - offset < len(flags) and flags[index - offset]


def _is_upstream(session: Session, x: object) -> bool:
    """Whether ``x`` was computed by an earlier graph, with a gradient, or without one for the next graph alone."""
    if not isinstance(x, torch.Tensor):
        return False
    regions = session.eager_regions
    return not x.is_leaf if x.requires_grad else regions is not None and regions.is_intermediate(x)
