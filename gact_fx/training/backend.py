"""The torch.compile backends: one that rewrites graphs by a session's plan, and ``backend="gact"`` on top of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, cast

import torch
from torch import fx

from gact_fx.breaks.graph_holdings import Slot, noting_holdings
from gact_fx.config import Config
from gact_fx.graphs.aot import JointGraph
from gact_fx.graphs.compilers import Compiled, compile_pair, interpret_graph, without_views
from gact_fx.graphs.double_backward import refuse_double_backward
from gact_fx.graphs.dynamo import Switch, compile_apart, lookup_backend
from gact_fx.graphs.hooks import outside_hooks, paused
from gact_fx.profiling.recorder import Recorder
from gact_fx.records import Boundary
from gact_fx.training.rewrite import RewrittenGraph
from gact_fx.training.session import Session

Graphs = tuple[fx.GraphModule, fx.GraphModule]


class Backend:
    """Rewrites graphs by the session's plan, or all at the profiling width, and compiles them.

    ``interpreted``: run them operator by operator instead, as profiling does. ``recorder`` watches them run.
    """

    def __init__(self, session: Session, *, interpreted: bool = False, recorder: Recorder | None = None) -> None:
        self._session = session
        self._interpreted = interpreted
        self._recorder = recorder

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        session = self._session
        found: list[RewrittenGraph] = []

        def cut(joint: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Graphs:
            upstream = _upstream(module, example_inputs, session)
            graph = JointGraph(joint, joint_inputs, upstream, **options)
            found.append(session.rewrite(graph, profiling=self._interpreted))
            return found[-1].pair.forward, found[-1].pair.backward

        def watch(graph: fx.GraphModule, is_backward: bool, compile: Callable[[], Compiled]) -> Compiled:
            run = interpret_graph(graph) if self._interpreted else compile()
            record = found[-1]
            if not is_backward and (self._interpreted or session.config.inner == "eager"):
                run = without_views(run, record.pair.num_user_outputs)
            if not self._interpreted:
                counted = session.run_counts.backward if is_backward else session.run_counts.forward
                run = counted(run, id(record))
                if session.eager_regions is not None and not is_backward:
                    holdings = session.eager_regions.holdings
                    run = noting_holdings(run, _crossing(record), holdings)
            if self._recorder is None:
                return run
            if is_backward:
                return self._recorder.backward(run, id(found), record.replayable, record.analysis)
            return self._recorder.forward(run, id(found), record.replayable)

        config, key = session.config, session.cache_key()
        patches = config.inductor_patches
        if config.swap and any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs):
            # What is fetched stays where it was put: Inductor counts host memory as memory of the device.
            patches = {"reorder_for_peak_memory": False, **patches}
        # Compiled graphs store what they save themselves.
        with paused():
            run = compile_pair(
                module, example_inputs, cut,
                inner=config.inner, cache_key=key, patches=patches, interpret=watch,
            )  # fmt: skip
        if session.eager_regions is not None:
            run = session.eager_regions.watch(run)
        return refuse_double_backward(outside_hooks(run))


def _crossing(graph: RewrittenGraph) -> list[tuple[Boundary, Slot, bool]]:
    """The activations that others may hold as well: where, in which slot, and whether the graph holds them exactly."""
    entries = graph.plan.entries()
    return [
        (tensor.boundary, (id(graph), tensor.name), how.nbytes(tensor, entries.get(tensor.key)) is None)
        for tensor, how in graph.analysis.pairs()
        if tensor.boundary is not None
    ]


def uncompressed(inner: str) -> str:
    """The backend of torch.compile that ``budget_bits=None`` stands for."""
    return {"inductor": "inductor", "eager": "aot_eager"}[inner]


def profiling_backend(session: Session) -> Backend:
    """Profiles the first training steps, and then makes the session's plan."""
    counts, copies = lambda: session.in_step, lambda: session.is_sharded
    recorder = Recorder(session.learn_from, every=1, counts=counts, copies=copies)
    session.on_plan.append(recorder.stop)
    session.on_failure.append(recorder.stop)
    return Backend(session, interpreted=True, recorder=recorder)


class Training:
    """Runs the session's plan, compiled anew for every plan, and profiles again where the configuration says so.

    ``compile(backend)`` gives a compiled model, and ``use`` has training run it. The steps that are profiled again run
    as the first one did: what the plan's codes give back lies on their grid, and says little about other codes.
    """

    def __init__(
        self,
        session: Session,
        compile: Callable[[Backend | str], Callable[..., Any]],
        use: Callable[[Callable[..., Any]], None],
    ) -> None:
        self._session = session
        self._compile = compile
        self._use = use
        self._planned: Callable[..., Any] | None = None
        self._profiled: Callable[..., Any] | None = None
        self._is_profiling = False
        every = session.config.profile_every
        # With the step before, whose gradient tells how much those of minibatches vary; that one runs the plan.
        counts, copies = lambda: session.in_step, lambda: session.is_sharded
        self._recorder = Recorder(session.learn_from, max(every, 2), 2, self._switch, counts, copies) if every else None
        session.on_plan.append(self.follow_plan)
        session.on_failure.append(lambda: use(compile(uncompressed(session.config.inner))))

    def follow_plan(self) -> None:
        """Run the session's plan from now on."""
        if self._recorder is not None:
            self._recorder.restart()
        self._planned = self._compile(Backend(self._session, recorder=self._recorder))
        self._use(self._planned)

    def _switch(self, profiling: bool) -> None:
        if profiling == self._is_profiling or self._planned is None:
            return
        self._is_profiling = profiling
        if profiling and self._profiled is None:
            self._profiled = self._compile(Backend(self._session, interpreted=True, recorder=self._recorder))
        self._use(self._profiled if profiling and self._profiled is not None else self._planned)


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
    for name in ("dynamic", "fullgraph"):
        if getattr(config, name) != getattr(Config, name):
            raise ValueError(f"gact_fx.compile: beside backend='gact', give {name} to torch.compile itself")
    if config.budget_bits is None or not torch.is_grad_enabled():
        compiler = lookup_backend(uncompressed(config.inner))
        changes = {"config_patches": config.inductor_patches} if config.inner == "inductor" else {}
        return cast(Compiled, compiler(module, list(example_inputs), **changes))
    session = Session(config)
    twin = fx.GraphModule(module, copy.deepcopy(module.graph))
    sampled = profiling_backend(session)(twin, example_inputs)
    switch = Switch()
    switch.use(sampled)
    generations = count(1)
    Training(session, lambda backend: compile_apart(module, backend, generation=next(generations)), switch.use)

    def run(*arguments: Any) -> Any:
        return switch.current()(*arguments)

    # Dynamo must not trace the choice itself.
    return cast(Compiled, torch.compiler.disable(run, recursive=False))


def _upstream(module: fx.GraphModule, example_inputs: Sequence[Any], session: Session) -> Callable[[int], bool]:
    """Whether flat input i is an activation of an earlier graph (it requires grad, and somebody computed it), or what
    an earlier graph made without a gradient, for this graph alone.
    """
    regions = session.eager_regions

    def is_upstream(x: object) -> bool:
        if not isinstance(x, torch.Tensor):
            return False
        return not x.is_leaf if x.requires_grad else regions is not None and regions.is_intermediate(x)

    # Parameters that Dynamo left inside the module come first among AOTAutograd's inputs.
    offset = len(list(module.parameters())) + len(list(module.buffers()))
    flags = [is_upstream(x) for x in example_inputs]
    return lambda index: 0 <= index - offset < len(flags) and flags[index - offset]
