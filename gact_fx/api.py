"""``gact_fx.compile`` and ``gact_fx.inspect``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import nn

from gact_fx.breaks.eager_regions import EagerRegions
from gact_fx.config import Config
from gact_fx.diagnostics.report import Report
from gact_fx.graphs.dynamo import Switch, compile_apart, compiled_call, own_call, set_compiled_call
from gact_fx.plan import Plan, model_fingerprint
from gact_fx.profiling.recorder import Recorder
from gact_fx.training.backend import Backend, Training, profiling_backend, uncompressed
from gact_fx.training.ranks import Ranks, unwrapped, without_sync
from gact_fx.training.sample_batches import LossFunction, default_loss, modules_of, profile_batches, unchanged
from gact_fx.training.session import ATTRIBUTE, Session, log

Model = TypeVar("Model", bound=Callable[..., Any])


def compile(
    model: Model,
    *,
    budget_bits: float | None = 4.0,
    sample_batches: Iterable[Any] | None = None,
    loss_fn: LossFunction | None = None,
    config: Config | None = None,
    plan: Plan | None = None,
    **overrides: Any,
) -> Model:
    """Compile ``model`` so that what forward keeps for backward is stored in ``budget_bits`` bits per element.

    A module is compiled in place and returned: its parameters, ``state_dict`` and class stay as they are. A plain
    callable gives a compiled callable. The training loop needs no change. Copies of the module (``copy.deepcopy``,
    ``pickle``, ``torch.save``) keep the plan, and run uncompressed until they are compiled with it. Ranks that train
    together, in DistributedDataParallel (around or inside of this call) or with ``fully_shard``, plan from what all of
    them measure.

    An exception on a sample batch reaches the caller, and leaves the model as it was before the call. Where a step of
    training cannot be profiled, the log says how training goes on: another step is the sample, or the plan there is
    stays, or after three failures the model is uncompressed.

    Args:
        model: module or callable to train.
        budget_bits: average bits per element over the floating saved activations that may be compressed, metadata
            included, in [1, 16]; ``None`` gives exactly torch.compile. Left at its default, it yields to ``config``.
        sample_batches: batches to choose the bits on, before training. Without them the first training step is the
            sample, and runs at 8 bits, operator by operator.
        loss_fn: ``loss_fn(model, batch)`` returns the scalar loss of one sample batch. Default: ``model(**batch)`` or
            ``model(*batch)``, and its ``.loss`` or, where it is a scalar, the output itself.
        config: all options at once; ``overrides`` are single fields of :class:`Config` laid over it.
        plan: decisions made earlier (``Plan.load``), instead of profiling.

    Raises:
        ValueError: an option that does not exist or is out of range; empty sample batches; a plan of another model; a
            loss that is not a scalar or has no gradient.
        TypeError: ``model`` cannot be called.
    """
    if not callable(model):
        raise TypeError(f"gact_fx.compile: model must be a torch.nn.Module or a function, got {type(model).__name__}")
    if config is None or budget_bits != Config.budget_bits:
        overrides = {"budget_bits": budget_bits, **overrides}
    config = Config.from_options(overrides, config)
    name = _fingerprint(model)
    if plan is not None:
        _check_plan(plan, config, name)
    session = Session(config, name, plan)
    target = _Target(model, session)
    ranks = Ranks(session, modules_of(model), target.use)
    training = Training(session, target.compile, ranks.use)
    if config.budget_bits is None:
        target.use(target.compile(uncompressed(config.inner)))
    elif plan is not None:
        training.follow_plan()
    elif sample_batches is None:
        ranks.use(target.compile(profiling_backend(session)))
    else:
        _profile(model, target, session, sample_batches, loss_fn or default_loss)
    return cast(Model, target.model)


def _profile(
    model: Callable[..., Any], target: _Target, session: Session, batches: Iterable[Any], loss_fn: LossFunction
) -> None:
    """Measure and plan on ``batches``, which leaves the model as it was."""
    recorder = Recorder(lambda steps, gradients: None, copies=lambda: session.is_sharded)
    target.use(target.compile(Backend(session, interpreted=True, recorder=recorder)))
    try:
        reached = modules_of(model) + modules_of(loss_fn)
        with unchanged(reached), without_sync(reached):
            profile_batches(target.model, session, recorder, batches, loss_fn, target.uncompiled())
    except BaseException as error:
        target.restore()
        log.warning("profiling failed with %s: the model is as it was before compile()", type(error).__name__)
        raise


def inspect(model: Callable[..., Any]) -> Report:
    """What was rewritten in a model compiled by :func:`compile`, and why not where it was not.

    Raises:
        ValueError: the model was not compiled by ``gact_fx.compile``.
    """
    session = getattr(model, ATTRIBUTE, None)
    if not isinstance(session, Session):
        raise ValueError(
            f"gact_fx.inspect: this {type(model).__name__} was not compiled by gact_fx.compile; call "
            "model = gact_fx.compile(model) first (torch.compile(backend='gact') keeps no report)"
        )
    if isinstance(model, nn.Module) and not isinstance(compiled_call(unwrapped(model)), Switch):
        note = (
            "this copy of a compiled model is not compiled: gact_fx.compile(copy, plan=gact_fx.inspect(copy).plan) "
            "has it run as the original does"
        )
        return Report((), (), session.plan, note)
    return Report.from_session(session)


class _Target:
    """The model as the caller holds it: a module compiled in place, or a function behind a callable of ours."""

    def __init__(self, model: Any, session: Session) -> None:
        self._original = unwrapped(model)
        self._config = session.config
        self._generation = 0
        self._switch = Switch()
        self.model: Any
        if isinstance(model, nn.Module):
            self.model = model
            self._before = compiled_call(self._original)
            self._session_before = getattr(model, ATTRIBUTE, None)
        else:
            self.model = _CompiledFunction(model)
        config = session.config
        session.eager_regions = EagerRegions(config.eager_bits, config.seed, config.min_elements, self._owned)
        self._regions = session.eager_regions if config.budget_bits is not None else None
        # Past nn.Module.__setattr__: a session is no submodule, and must not be pickled as one.
        object.__setattr__(self.model, ATTRIBUTE, session)

    def compile(self, backend: str | Callable[..., Any]) -> Callable[..., Any]:
        """The model compiled with ``backend``, to be used now or later."""
        self._generation += 1
        function = self._original
        if isinstance(self._original, nn.Module):
            function = own_call(self._original)
        options: dict[str, Any] = {"dynamic": self._config.dynamic, "fullgraph": self._config.fullgraph}
        if isinstance(backend, str):
            options["options"] = self._config.inductor_patches or None
        return compile_apart(function, backend, generation=self._generation, **options)

    def use(self, compiled: Callable[..., Any]) -> None:
        """Have the model run ``compiled``, from its next call on."""
        self._switch.use(compiled if self._regions is None else self._regions.around(compiled))
        if isinstance(self._original, nn.Module):
            set_compiled_call(self._original, self._switch)
        else:
            self.model.compiled = self._switch

    def _owned(self) -> list[torch.Tensor]:
        """Parameters and buffers, of a function's modules too."""
        return [x for module in modules_of(self._original) for x in (*module.parameters(), *module.buffers())]

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[Any]:
        """Within, the model runs as it was before compile()."""
        if not isinstance(self._original, nn.Module):
            yield self._original
            return
        # The module in DDP, not DDP: what is compared here is one rank's gradients.
        compiled = compiled_call(self._original)
        set_compiled_call(self._original, self._before)
        try:
            yield self._original
        finally:
            set_compiled_call(self._original, compiled)

    def restore(self) -> None:
        """The model as it was before compile()."""
        if isinstance(self._original, nn.Module):
            set_compiled_call(self._original, self._before)
            if self._session_before is None:
                object.__delattr__(self.model, ATTRIBUTE)
            else:
                object.__setattr__(self.model, ATTRIBUTE, self._session_before)


class _CompiledFunction:
    """A compiled plain callable, whose compiled form changes: from profiling to the plan, and with every new plan."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__doc__ = function.__doc__
        self.compiled: Callable[..., Any] = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)


def _fingerprint(model: object) -> str:
    if not isinstance(model, nn.Module):
        return ""
    return model_fingerprint([(name, tuple(p.shape)) for name, p in model.named_parameters()])


def _check_plan(plan: Plan, config: Config, name: str) -> None:
    if plan.model and name and plan.model != name:
        raise ValueError(
            f"gact_fx.compile: the plan was made for another model (parameters {plan.model}, this model has {name}); "
            "profile this one with sample_batches, or compile without plan="
        )
    if plan.recompute != config.recompute:
        raise ValueError(
            f"gact_fx.compile: the plan was made for recompute={plan.recompute!r}, got recompute={config.recompute!r}; "
            "pass the plan's"
        )
    _check_budget(plan, config)
    # bfloat16 codes have neither groups nor dither.
    tensors = [t for graph in plan.graphs for t in graph.tensors if t.bits is not None and t.bits <= 8]
    for option, anything in (("group_size", None), ("rounding", "auto")):
        wanted, found = getattr(config, option), {getattr(tensor, option) for tensor in tensors}
        others = sorted(found - {wanted})
        if wanted != anything and others:
            raise ValueError(
                f"gact_fx.compile: the plan was made for {option}={others[0]!r}, got {option}={wanted!r}; leave it out"
            )


def _check_budget(plan: Plan, config: Config) -> None:
    """A plan has spent its budget; another one only matters where the model is profiled again."""
    if config.profile_every is not None:
        return
    asked = {name: getattr(config, name) for name in ("budget_bytes", "max_gradient_noise")}
    if config.budget_bits not in (Config.budget_bits, plan.budget_bits):
        asked["budget_bits"] = config.budget_bits
    for name, value in asked.items():
        if value is not None:
            raise ValueError(
                f"gact_fx.compile: {name}={value!r} does nothing beside plan=, whose bits are chosen; leave one "
                "of them out, or pass profile_every to plan again"
            )
