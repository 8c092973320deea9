"""The torch.compile backends: one that profiles real steps, one that runs a plan, and ``backend="gact"`` of both."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from gact_fx.aot import GraphPair, partition
from gact_fx.config import Config
from gact_fx.driver import Driver
from gact_fx.inner import Compiled, boxed, channels_last_nodes, compile_pair, interpret_graph, redraws
from gact_fx.passes import measure_sensitivity
from gact_fx.records import GraphAnalysis
from gact_fx.session import Session, log
from gact_fx.tape import Step, Tape

Graphs = tuple[fx.GraphModule, fx.GraphModule]


class ProfilingBackend:
    """Runs graphs uncompressed and measures, in every backward pass, the sensitivities of what they saved.

    With ``plan_after_step`` the session's plan is made as soon as every graph that ran forward has run backward.
    """

    def __init__(self, session: Session, *, plan_after_step: bool) -> None:
        self._session = session
        self._plan_after_step = plan_after_step
        self._tape = Tape()

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        session = self._session
        found: list[tuple[GraphPair, GraphAnalysis]] = []

        def cut(joint: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Graphs:
            pair = partition(joint, joint_inputs, _upstream(module, example_inputs), **options)
            found.append((pair, Driver(pair, session.config).analyze()))
            return pair.forward, pair.backward

        def interpret(graph: fx.GraphModule, is_backward: bool, compile: Callable[[], Compiled]) -> Compiled:
            pair, analysis = found[-1]
            run = compile() if redraws(pair.backward) else interpret_graph(graph)
            if is_backward:
                # AOTAutograd may have pruned outputs since it was cut.
                return self._backward(run, replace(pair, backward=graph), analysis, id(found))
            return self._forward(run, pair, id(found))

        inner = session.config.inner
        return compile_pair(module, example_inputs, cut, inner=inner, cache_key="profile", interpret=interpret)

    def measure(self) -> None:
        """Measure the sensitivities of the step on the tape, and start a new one."""
        session, config = self._session, self._session.config
        steps = self._tape.steps()
        self._tape = Tape()
        if not all(step.is_finite for step in steps):
            log.warning("the sample step has NaN or infinity in its gradients; sampling another one")
            return
        profiles = [session.profile(step.analysis) for step in steps]
        if not config.adaptive or any(redraws(step.pair.backward) for step in steps):
            # Random numbers that backward draws again from seeds cannot be replayed: these graphs get equal widths.
            return
        session.announce(sum(len(step.analysis.quantized()) for step in steps))
        with torch.no_grad(), torch.random.fork_rng(_cuda_devices(steps)):
            measured = measure_sensitivity(
                steps,
                group_size=config.group_size,
                seed=config.seed,
                draws=config.profile_draws,
                rounding=config.rounding,
                progress=session.progress,
            )
        for profile, step, sensitivities in zip(profiles, steps, measured, strict=True):
            profile.add(step.analysis, sensitivities)

    def _forward(self, run: Compiled, pair: GraphPair, key: int) -> Compiled:
        def forward(arguments: list[Any]) -> Any:
            if self._session.plan is not None:
                return run(arguments)
            # A graph whose outputs the loss ignored never runs backward; do not wait for it for ever.
            if self._plan_after_step and self._tape.ran_forward(key) and self._tape.has_gradients:
                self._plan()
                return run(arguments)
            inputs = list(arguments)
            outputs = run(arguments)
            self._tape.record_forward(key, inputs, outputs[: pair.num_user_outputs])
            return outputs

        return boxed(forward)

    def _backward(self, run: Compiled, pair: GraphPair, analysis: GraphAnalysis, key: int) -> Compiled:
        def backward(arguments: list[Any]) -> Any:
            if self._session.plan is None:
                self._tape.record_backward(key, pair, analysis, arguments)
            result = run(arguments)
            if self._plan_after_step and self._session.plan is None and self._tape.is_complete:
                self._plan()
            return result

        return boxed(backward)

    def _plan(self) -> None:
        self.measure()
        if self._session.profiles:
            self._session.make_plan()


class PlannedBackend:
    """Rewrites graphs by the session's plan, and compiles them."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        session = self._session

        def cut(joint: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Graphs:
            pair = partition(joint, joint_inputs, _upstream(module, example_inputs), **options)
            pair = session.rewrite(pair, channels_last_nodes(pair.forward, session.config.inner))
            return pair.forward, pair.backward

        inner = session.config.inner
        return compile_pair(module, example_inputs, cut, inner=inner, cache_key=session.cache_key())


def uncompressed(inner: str) -> str:
    """The backend of torch.compile that ``budget_bits=None`` stands for."""
    return {"inductor": "inductor", "eager": "aot_eager"}[inner]


def gact(module: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None) -> Compiled:
    """``torch.compile(model, backend="gact", options={...})``; the options are the fields of :class:`Config`.

    Every graph is its own model here: its first training step is the sample, the next one runs its plan.

    Raises:
        ValueError: an unknown option, or one out of its range.
    """
    config = Config.from_options(options or {})
    if config.budget_bits is None or not torch.is_grad_enabled():
        compiler: Any = torch._dynamo.lookup_backend(uncompressed(config.inner))
        return cast(Compiled, compiler(module, list(example_inputs)))
    session = Session(config)
    twin = fx.GraphModule(module, copy.deepcopy(module.graph))
    sampled = ProfilingBackend(session, plan_after_step=True)(twin, example_inputs)
    planned: Callable[..., Any] = torch.compile(module, backend=PlannedBackend(session))

    def run(*arguments: Any) -> Any:
        return (sampled if session.plan is None else planned)(*arguments)

    # Dynamo must not trace the choice itself.
    return cast(Compiled, torch.compiler.disable(run, recursive=False))


def _upstream(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[int], bool]:
    """Whether flat input i is an activation of an earlier graph: it requires grad, and somebody computed it."""
    # Parameters that Dynamo left inside the module come first among AOTAutograd's inputs.
    offset = len(list(module.parameters())) + len(list(module.buffers()))
    flags = [isinstance(x, torch.Tensor) and x.requires_grad and not x.is_leaf for x in example_inputs]
    return lambda index: 0 <= index - offset < len(flags) and flags[index - offset]


def _cuda_devices(steps: Sequence[Step]) -> list[int]:
    tensors = [value for step in steps for value in step.arguments if isinstance(value, torch.Tensor)]
    return sorted({t.device.index for t in tensors if t.device.type == "cuda" and t.device.index is not None})
