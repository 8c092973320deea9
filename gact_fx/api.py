"""``gact_fx.compile`` and ``gact_fx.inspect``."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

from torch import nn

from gact_fx.breaks.eager_regions import EagerRegions
from gact_fx.config import Config
from gact_fx.diagnostics.report import Report
from gact_fx.plan import Plan, model_fingerprint
from gact_fx.profiling.recorder import Recorder
from gact_fx.training.backend import run_states
from gact_fx.training.lifecycle import State
from gact_fx.training.minibatch_variance import LossFunction
from gact_fx.training.model import Target, is_copy, owned_by, sessions_within
from gact_fx.training.ranks import Ranks, without_sync
from gact_fx.training.sample_batches import default_loss, profile_batches
from gact_fx.training.session import Session
from gact_fx.training.unchanged import modules_of, unchanged

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
        sample_batches: batches to choose the bits on, before training; of a loader the first 8 are taken. Without them
            the first training step is the sample, and runs at 8 bits, operator by operator.
        loss_fn: ``loss_fn(model, batch)`` returns the scalar loss of one sample batch. Default: ``model(**batch)`` or
            ``model(*batch)``, and its ``.loss`` or, where it is a scalar, the output itself.
        config: all options at once; ``overrides`` are single fields of :class:`Config` laid over it.
        plan: decisions made earlier (``Plan.load``), instead of profiling. Unless ``seed`` is given, its noise is that
            of the ``seed`` it was made with.

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
    session = _session(model, config, plan)
    target, ranks = Target(model, session), Ranks(session, modules_of(model))
    samples = None
    if sample_batches is not None and session.lifecycle.state is State.PROFILING:
        samples = Recorder(lambda steps, gradients: None, copies=lambda: ranks.is_sharded)
    run_states(session, target.compile, ranks, samples)
    target.install()
    if samples is not None and sample_batches is not None:
        loss = loss_fn or default_loss
        modules = modules_of(model) + modules_of(loss)
        # Without a trace: neither in the modules nor, for DDP, on other ranks.
        with target.restored_on_failure(), unchanged(modules), without_sync(modules):
            profile_batches(target.model, session, samples, sample_batches, loss, target.uncompiled)
    if config.budget_bits is not None:
        session.lifecycle.before_calls(ranks.before_call)
    return cast(Model, target.model)


def inspect(model: Callable[..., Any]) -> Report:
    """How each saved tensor of a compiled model is stored, and why not smaller.

    ``model`` was compiled by `compile`, or contains one module that was, as wrappers do.

    Raises:
        ValueError: the model was not compiled by ``gact_fx.compile``, or several of its modules were.
    """
    found = sessions_within(model)
    if len(found) > 1:
        raise ValueError(
            f"gact_fx.inspect: {len(found)} modules of this {type(model).__name__} were compiled, each with a plan of "
            f"its own; inspect them one by one ({', '.join(list(found)[:4])}{', …' if len(found) > 4 else ''})"
        )
    session = next(iter(found.values()), None)
    if session is None:
        raise ValueError(
            f"gact_fx.inspect: this {type(model).__name__} was not compiled by gact_fx.compile; call "
            "model = gact_fx.compile(model) first (torch.compile(backend='gact') keeps no report)"
        )
    if is_copy(model, session):
        note = (
            "this copy of a compiled model is not compiled: gact_fx.compile(copy, plan=gact_fx.inspect(copy).plan) "
            "has it run as the original does"
        )
        return Report((), (), session.plan, note)
    session.settle()
    return Report.from_session(session, model)


def _session(model: Callable[..., Any], config: Config, plan: Plan | None) -> Session:
    name = ""
    if isinstance(model, nn.Module):
        name = model_fingerprint([(key, tuple(p.shape)) for key, p in model.named_parameters()])
    misfit = next(_misfits(plan, config, name), None) if plan is not None else None
    if misfit is not None:
        raise ValueError(f"gact_fx.compile: {misfit}")
    if plan is not None and config.seed != Config.seed:
        plan = plan.reseeded(config.seed)
    regions = None
    if config.budget_bits is not None:
        regions = EagerRegions(config.eager_bits, config.seed, config.min_elements, lambda: owned_by(model))
    return Session(config, name, plan, regions)


def _misfits(plan: Plan, config: Config, name: str) -> Iterator[str]:
    """Why ``plan`` does not go with the model of that fingerprint, or with the options given beside it."""
    if plan.model and name and plan.model != name:
        yield (
            f"the plan was made for another model (parameters {plan.model}, this model has {name}); "
            "profile this one with sample_batches, or compile without plan="
        )
    if plan.recompute != config.recompute:
        yield f"the plan was made for recompute={plan.recompute!r}, got recompute={config.recompute!r}; pass the plan's"
    # A plan has spent its budget; another one only matters where the model is profiled again.
    if config.profile_every is None:
        asked = {"budget_bytes": config.budget_bytes, "max_gradient_noise": config.max_gradient_noise}
        if config.budget_bits not in (Config.budget_bits, plan.budget_bits):
            asked["budget_bits"] = config.budget_bits
        for option, value in asked.items():
            if value is not None:
                yield (
                    f"{option}={value!r} does nothing beside plan=, whose bits are chosen; leave one of them out, or "
                    "pass profile_every to plan again"
                )
    # bfloat16 codes have neither groups nor dither.
    tensors = (tensor for graph in plan.graphs for tensor in graph.tensors)
    codes = [tensor.code for tensor in tensors if tensor.code is not None and tensor.code.bits <= 8]
    for option, anything in (("group_size", None), ("rounding", "auto")):
        wanted, found = getattr(config, option), {getattr(code, option) for code in codes}
        others = sorted(found - {wanted})
        if wanted != anything and others:
            yield f"the plan was made for {option}={others[0]!r}, got {option}={wanted!r}; leave it out"
