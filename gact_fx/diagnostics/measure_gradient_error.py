"""``gact_fx.measure_gradient_error``: bias and variance of the compressed gradient, against the exact one."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from gact_fx.diagnostics.gradient_error import GradientError
from gact_fx.diagnostics.gradient_moments import GradientMoments, total
from gact_fx.graphs.aot import JointGraph
from gact_fx.graphs.compilers import Compiled, boxed
from gact_fx.graphs.dynamo import compile_apart, new_code_name, own_call, without_recompile_limits
from gact_fx.graphs.interpreter import GraphInterpreter
from gact_fx.graphs.recurrent_modules import can_trace
from gact_fx.passes import PIPELINE
from gact_fx.passes.copy_for_replay import copy_for_replay
from gact_fx.passes.pipeline import Pass
from gact_fx.training.backend import Backend
from gact_fx.training.minibatch_variance import LossFunction, gradients_of
from gact_fx.training.model import running, session_of
from gact_fx.training.rewrite import RewrittenGraph
from gact_fx.training.sample_batches import WHAT_BATCHES_ARE, check_loss, default_loss, iterate
from gact_fx.training.session import Session
from gact_fx.training.unchanged import modules_of, unchanged
from gact_fx.training.usage_error import UsageError, first_line

_WHO = "gact_fx.measure_gradient_error"
# Where the seed stands among the arguments.
_SEEDS: dict[Any, int] = {torch.ops.gact_fx.compress.default: 3, torch.ops.gact_fx.decompress.default: 5}
# Losses of one batch may differ by this share: operators that add up in any order (atomics on a GPU).
_SAME_LOSS = 1e-3


def measure_gradient_error(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None = None, *, draws: int = 8
) -> GradientError:
    """Compare the gradients that ``model`` trains with to exact ones, batch by batch; changes nothing about ``model``.

    For every batch, the exact gradient is computed once and the compressed gradient ``draws`` times, each time with
    other rounding noise. All have the same dropout masks, buffers and parameters. The graphs are those of training, run
    operator by operator; what eager PyTorch saves between them is stored in codes as in training. Memory holds a few
    gradients in float64, not all draws.

    Args:
        model: a module compiled by ``gact_fx.compile`` that has a plan; measured in the mode (train or eval) it is in.
        batches: batches to measure on; two or more give the variance from batch to batch.
        loss_fn: as for ``gact_fx.compile``. It must draw its random numbers from torch.
        draws: compressed gradients per batch, at least 2.

    Raises:
        ValueError: ``model`` was not compiled, has no plan, or is compiled without compression; ``draws`` out of range;
            no batches, or a batch that the model rejects; a loss that is not a scalar, has no gradient, or differs from
            call to call with equal seeds.
    """
    session = _session(model)
    if not isinstance(draws, int) or isinstance(draws, bool) or draws < 2:
        raise UsageError(f"{_WHO}: draws must be a whole number of at least 2, got {draws!r}; a variance takes two")
    loss_fn = loss_fn or default_loss
    backend = _BothWays(session)
    sums = {p: GradientMoments(name, p) for name, p in model.named_parameters() if p.requires_grad}
    modules = [model, *modules_of(loss_fn)]
    count = 0
    with unchanged(modules), _in_place(model, backend):
        for count, batch in enumerate(iterate(batches, f"{_WHO}: batches"), start=1):
            seed = int(torch.randint(2**62, ()))
            losses = []
            for draw in range(draws + 1):
                # Draw 0 is exact. Each batch draws other noise than the others, so that errors are independent.
                backend.use_draw((count - 1) * draws + draw if draw else 0)
                with unchanged(modules):
                    torch.manual_seed(seed)
                    loss = _loss(loss_fn, model, batch, count - 1)
                    losses.append(float(loss.detach()))
                    found = gradients_of(loss)
                for parameter, entry in sums.items():
                    entry.add(found.get(parameter), is_exact=draw == 0)
            _check_losses(losses, count - 1)
            for entry in sums.values():
                entry.finish_batch()
    if not count:
        raise UsageError(f"{_WHO}: batches is empty, got no batch; give at least one")
    if not backend.has_run:
        raise UsageError(
            f"{_WHO}: torch.compile captured no graph with a gradient, got nothing to measure; run with "
            'TORCH_LOGS="graph_breaks" to see why'
        )
    reached = [entry for entry in sums.values() if entry.was_reached]
    predicted = session.plan.variance if session.plan is not None else None
    return GradientError(tuple(entry.result() for entry in reached), total(reached), count, draws, predicted)


class _BothWays(Backend):
    """Runs the session's graphs operator by operator: exact while ``draw`` is 0, else with the noise of that draw."""

    def __init__(self, session: Session) -> None:
        # The exact graphs are a copy of the pair, made right behind the cut.
        behind = next(i for i, each in enumerate(PIPELINE, start=1) if each.name == "partition")
        copying = Pass("copy_for_replay", copy_for_replay, gives="exact")
        # Fusing and swapping change no value; what runs here are the graphs before them.
        self._twin = session.twin((*PIPELINE[:behind], copying, *PIPELINE[behind:]), fuse="off", swap=False)
        super().__init__(self._twin, interpreted=True)
        self.use_draw(0)
        self.has_run = False

    def use_draw(self, draw: int) -> None:
        """Run graphs, and what runs in eager PyTorch between them, with the noise of that draw."""
        self.draw = draw
        # 62 bits, so that seeds stay within 63.
        self.noise = draw * 0x9E3779B97F4A7C15 % 2**62
        if self._twin.eager_regions is not None:
            self._twin.eager_regions.is_exact, self._twin.eager_regions.noise = not draw, self.noise

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled`` with what is done for what runs between its graphs."""
        return compiled if self._twin.eager_regions is None else self._twin.eager_regions.around(compiled)

    def rewrite(self, joint: JointGraph) -> RewrittenGraph:
        return self._twin.rewrite(joint)

    def watched(self, run: Compiled, graph: RewrittenGraph, key: object, is_backward: bool) -> Compiled:
        assert graph.exact is not None
        pairs = graph.exact, graph.replayable
        exact, rewritten = (pair.backward if is_backward else pair.forward for pair in pairs)
        # Both have the same inputs and outputs, in number and order: only what travels between them differs.
        run_exact, run_rewritten = GraphInterpreter(exact), _Reseeded(rewritten, self)

        def call(arguments: list[Any]) -> Any:
            self.has_run |= is_backward
            return (run_rewritten if self.draw else run_exact).boxed_run(arguments)

        return boxed(call)


class _Reseeded(GraphInterpreter):
    """Runs a rewritten graph with the noise of ``source``: the same in forward and backward, as dither must have it."""

    def __init__(self, module: fx.GraphModule, source: _BothWays) -> None:
        super().__init__(module)
        self._source = source

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position = _SEEDS.get(target)
        if position is not None:
            args = (*args[:position], args[position] ^ self._source.noise, *args[position + 1 :])
        return super().call_function(target, args, kwargs)


@contextmanager
def _in_place(model: nn.Module, backend: _BothWays) -> Iterator[None]:
    """``model`` compiled with ``backend``, and afterwards as it was: the running plan and its records."""
    # Frames behind a graph break are shared with the model as it trains. At the limit of recompilations Dynamo would
    # run them uncompiled, hence exactly, without a word; and the model must not come nearer to its own limit (which
    # torch 2.11 cannot keep apart).
    recurrent = can_trace(model.modules())
    compiled = compile_apart(own_call(model, new_code_name()), backend, recurrent=recurrent)
    with (
        running(model, backend.around(compiled)),
        torch.enable_grad(),
        without_recompile_limits(),
    ):
        yield


def _session(model: object) -> Session:
    session, kind = session_of(model), type(model).__name__
    if session is not None:
        session.settle()
    if session is None:
        problem = (
            f"be a module compiled by gact_fx.compile, got {kind}, which was not; "
            "call model = gact_fx.compile(model, sample_batches=...) first"
        )
    elif not isinstance(model, nn.Module):
        problem = f"be a torch.nn.Module, whose parameters have names, got {kind}; compile the module"
    elif session.config.budget_bits is None:
        problem = "be compiled with compression, got budget_bits=None; its gradient is exact"
    elif session.plan is None:
        problem = "have a plan, got one without; run a training step, or compile it with sample_batches"
    else:
        return session
    raise UsageError(f"{_WHO}: model must {problem}")


def _loss(loss_fn: LossFunction, model: nn.Module, batch: Any, index: int) -> torch.Tensor:
    try:
        loss = loss_fn(model, batch)
        check_loss(loss)
    except Exception as error:
        # What Dynamo wraps says more than its wrapping.
        cause = getattr(error, "inner_exception", error)
        line = first_line(cause)
        if isinstance(cause, UsageError):
            # Checks that are shared with compile(), and name it.
            raise UsageError(f"{_WHO}: {line.partition(': ')[2]}") from error
        raise UsageError(
            f"{_WHO}: batch {index} failed, got {type(cause).__name__}: {line}; every {WHAT_BATCHES_ARE}"
        ) from error
    return loss


def _check_losses(losses: list[float], index: int) -> None:
    """Compression does not touch forward, so that all losses of a batch must be one."""
    far = [loss for loss in losses if not math.isclose(loss, losses[0], rel_tol=_SAME_LOSS, abs_tol=1e-12)]
    if not math.isfinite(losses[0]) or far:
        found = f"{losses[0]:.6g} and then {far[0]:.6g}" if far and math.isfinite(losses[0]) else f"{losses[0]}"
        raise UsageError(
            f"{_WHO}: the loss of batch {index} must be finite and the same for equal seeds of torch, got {found}; "
            "draw random numbers from torch, and keep no state between calls"
        )
