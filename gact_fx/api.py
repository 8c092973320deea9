"""``gact_fx.compile``, ``gact_fx.inspect`` and ``gact_fx.estimate``."""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar, cast

from torch import nn

from gact_fx.breaks.eager_regions import EagerRegions
from gact_fx.config import OPTIONS, Config, given
from gact_fx.diagnostics.estimate import Estimate, Subject, make_estimate, memory_nbytes
from gact_fx.diagnostics.report import Report
from gact_fx.errors import UsageError, UsageTypeError, unknown_option
from gact_fx.options import BUDGETS, UNSET, bits_at, is_schedule
from gact_fx.plan import Plan, model_fingerprint
from gact_fx.profiling.recorder import Recorder
from gact_fx.training.backend import run_states
from gact_fx.training.bit_schedule import BitSchedule
from gact_fx.training.lifecycle import State
from gact_fx.training.minibatch_variance import LossFunction
from gact_fx.training.model import Target, is_copy, owned_by, restore, sessions_within
from gact_fx.training.progress import say
from gact_fx.training.ranks import Ranks, unwrapped, without_sync
from gact_fx.training.sample_batches import default_loss, profile_batches
from gact_fx.training.session import Session
from gact_fx.training.unchanged import modules_of, unchanged

Model = TypeVar("Model", bound=Callable[..., Any])


def compile(
    model: Model, *,
    budget_bits: float | Mapping[int, float] | Callable[[int], float] | None = UNSET,
    sample_batches: Iterable[Any] | None = None, loss_fn: LossFunction | None = None,
    config: Config | str | None = None, plan: Plan | str | os.PathLike[str] | None = None,
    budget_bytes: int | str | None = UNSET, max_gradient_noise: float | None = UNSET, adaptive: bool = UNSET,
    group_size: int | None = UNSET, min_elements: int = UNSET, rounding: str = UNSET, seed: int = UNSET,
    sensitivity: str = UNSET, profile_draws: int = UNSET, profile_every: int | None = UNSET, recompute: str = UNSET,
    unknown_operators: str = UNSET, swap: bool = UNSET, split_loss: bool = UNSET, loss_only: bool = UNSET,
    inner: str = UNSET, fuse: str = UNSET, dynamic: bool | None = UNSET, fullgraph: bool = UNSET,
    mode: str | None = UNSET, inductor_options: Mapping[str, Any] | None = UNSET,
    **unknown: NoReturn,
) -> Model:  # fmt: skip
    """Compile ``model`` so that what forward keeps for backward is stored in ``budget_bits`` bits per element.

    A module is compiled in place and returned: its parameters, ``state_dict`` and class stay as they are. A plain
    callable gives a compiled callable. The training loop needs no change. Copies of the module (``copy.deepcopy``,
    ``pickle``, ``torch.save``) keep the plan, and run uncompressed until they are compiled with it. Ranks that train
    together, in DistributedDataParallel (around or inside of this call) or with ``fully_shard``, plan from what all of
    them measure. :func:`uncompile` undoes it all.

    An exception on a sample batch reaches the caller, and leaves the model as it was before the call. Where a step of
    training cannot be profiled, the log says how training goes on: another step is the sample, or the plan there is
    stays, or after three failures the model is uncompressed.

    Args:
        model: module or callable to train.
        budget_bits: average bits per element over the floating saved activations that may be compressed, metadata
            included, in [1, 16]; ``None`` gives exactly torch.compile. A schedule gives the bits by training step:
            ``{0: 8, 500: 4}``, or a function of the step. The other options are those of :class:`Config`, which has all
            descriptions and defaults.
        sample_batches: batches to choose the bits on, before training; of a loader the first 8 are taken. Without them
            the first training step is the sample, and runs operator by operator, with one width for all tensors: 8
            bits, or of a large model the whole number below ``budget_bits``, 4 at least.
        loss_fn: ``loss_fn(model, batch)`` returns the scalar loss of one sample batch. Default: ``model(**batch)`` or
            ``model(*batch)``, and its ``.loss`` or, where it is a scalar, the output itself.
        config: all options at once, or one of GACT's level names (``"L2"``). Options given beside it are laid over it.
        plan: decisions made earlier (``report.plan``, or the path of a file that ``plan.save`` wrote), instead of
            profiling. Unless ``seed`` is given, its noise is that of the ``seed`` it was made with.

    Raises:
        ValueError: an option that does not exist or is out of range, or contradicts another one; empty sample batches;
            a plan of another model; a loss that is not a scalar or has no gradient.
        TypeError: ``model`` cannot be called.
    """
    options = given(locals())
    for name in unknown:
        raise unknown_option("gact_fx.compile", name, (*OPTIONS, "sample_batches", "loss_fn", "config", "plan"))
    samples = None if sample_batches is None else Samples(sample_batches, loss_fn)
    if samples is None and loss_fn is not None:
        raise UsageError("gact_fx.compile: loss_fn is for sample_batches, got none; pass these too, or leave it out")
    return compile_by(model, Config.from_options(options, config), plan, samples, asked=options)


@dataclass(frozen=True)
class Samples:
    """Batches to profile before training, and the loss of one; None: `default_loss`."""

    batches: Iterable[Any]
    loss_fn: LossFunction | None = None


def compile_by(
    model: Model,
    config: Config,
    plan: Plan | str | os.PathLike[str] | None,
    samples: Samples | None = None,
    *,
    asked: Mapping[str, Any] | None = None,
) -> Model:
    """`compile` with its options in one piece.

    ``asked``: the options that the caller gave beside ``config``, which ``plan`` has to be reconciled with; None where
    the plan is one of this very configuration.
    """
    if not callable(model):
        raise UsageTypeError(
            f"gact_fx.compile: model must be a torch.nn.Module or a function, got {type(model).__name__}"
        )
    if plan is not None and samples is not None:
        raise UsageError(
            "gact_fx.compile: sample_batches do nothing beside plan=, whose bits are chosen; leave one of them out"
        )
    if plan is not None and not isinstance(plan, Plan):
        plan = Plan.load(plan)
    session = _session(model, config, plan, asked)
    target, ranks = Target(model, session), Ranks(session, modules_of(model))
    recorder = None
    if samples is not None and session.lifecycle.state is State.PROFILING:
        recorder = Recorder(lambda steps, gradients: True, copies=lambda: ranks.is_sharded)
    run_states(session, target.compile, ranks, recorder)
    target.install()
    if session.lifecycle.state is State.PLANNED:
        say(f"{session.title}: compiled with a plan made before")
    elif session.lifecycle.state is State.PROFILING and recorder is None:
        say(f"{session.title}: the next training step is profiled; it takes longer, and more memory, than all others")
    if samples is not None and recorder is not None:
        loss = samples.loss_fn or default_loss
        modules = modules_of(model) + modules_of(loss)
        # Without a trace: neither in the modules nor, for DDP, on other ranks.
        with target.restored_on_failure(), unchanged(modules), without_sync(modules):
            profile_batches(target.model, session, recorder, samples.batches, loss, target.uncompiled)
    if config.budget_bits is not None:
        session.lifecycle.before_calls(ranks.before_call)
        if is_schedule(config.budget_bits):
            schedule = BitSchedule(session, config.budget_bits, lambda: ranks.in_step)
            session.lifecycle.before_calls(schedule.before_call)
        session.lifecycle.at_close(ranks.release)
    return cast(Model, target.model)


def uncompile(model: Model) -> Model:
    """Undo :func:`compile`: ``model``, and every module within it, runs again what it ran before it was compiled.

    A module is changed in place and returned; of a compiled function, the function comes back. Parameters, gradients
    and optimizers are left alone, so that training may go on, uncompressed. The plan and the compiled graphs are freed,
    except what an autograd graph still holds: keep ``gact_fx.inspect(model).plan`` to compile with it again. Of ranks
    that train together, all have to call it, between two steps.

    Raises:
        ValueError: neither the model nor a module within it was compiled by ``gact_fx.compile``.
    """
    found = restore(model)
    if found is None:
        raise UsageError(
            f"gact_fx.uncompile: this {type(model).__name__} was not compiled by gact_fx.compile, nor was a module "
            "within it; leave the call out"
        )
    return cast(Model, found)


def inspect(model: Callable[..., Any]) -> Report:
    """How each saved tensor of a compiled model is stored, and why not smaller.

    ``model`` was compiled by `compile`, or contains one module that was, as wrappers do.

    Raises:
        ValueError: the model was not compiled by ``gact_fx.compile``, or several of its modules were.
    """
    found = sessions_within(model)
    if len(found) > 1:
        raise UsageError(
            f"gact_fx.inspect: {len(found)} modules of this {type(model).__name__} were compiled, each with a plan of "
            f"its own; inspect them one by one ({', '.join(list(found)[:4])}{', …' if len(found) > 4 else ''})"
        )
    session = next(iter(found.values()), None)
    if session is None:
        raise UsageError(
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


def estimate(
    model: nn.Module, batch: Any, *,
    budget_bits: float = UNSET, loss_fn: LossFunction | None = None, memory: int | str | None = None,
    noise: bool = False, optimizer_states: int = 2, config: Config | str | None = None, **options: Any,
) -> Estimate:  # fmt: skip
    """What a planned step of training would take, before anything is trained.

    The model is traced on tensors without data, which takes as long as torch.compile takes to trace it, and next to no
    memory. Model, gradients, buffers and random number generators stay as they are. Widths are not measured: every
    tensor counts as equally sensitive, which gives nearly the same bytes. Where the model breaks into several graphs,
    figures are sums over all of them. The peak is that of PyTorch's allocator: what libraries take inside of an
    operator, and what the optimizer's step itself takes, is not known.

    Args:
        model: a module, in the mode (train or eval) in which it is trained; it may be compiled already.
        batch: a batch like those of training.
        budget_bits: as for :func:`compile`, whose other options may be given as well.
        loss_fn: as for :func:`compile`.
        memory: bytes, or a text as ``"8GB"``: the largest batch of which model, batch, optimizer and a step fit in.
        noise: measure the noise on the batch as well, by a deep copy of the model that runs a step with real numbers;
            the plan, and its bytes, are the measured ones then.
        optimizer_states: how many numbers the optimizer keeps for each trained parameter: 2 for Adam, 1 for SGD with
            momentum, 0 for SGD.

    Raises:
        ValueError: an option or a loss as for :func:`compile`; ``memory`` that is not a number of bytes.
        TypeError: ``model`` is no module.
        RuntimeError: the model cannot be run without data: it reads values of tensors between graphs, say, or the
            batch does not fit; or it is sharded, or no graph of it was captured.
    """
    if not isinstance(model, nn.Module):
        raise UsageTypeError(
            f"gact_fx.estimate: model must be a torch.nn.Module, got {type(model).__name__}; pass the module, and what "
            "a function does with it as loss_fn(model, batch)"
        )
    for name in options:
        if name not in OPTIONS:
            raise unknown_option("gact_fx.estimate", name, (*OPTIONS, "loss_fn", "memory", "noise", "optimizer_states"))
    chosen = Config.from_options({**({} if budget_bits is UNSET else {"budget_bits": budget_bits}), **options}, config)
    chosen = replace(chosen, budget_bits=bits_at(chosen.budget_bits, 0))
    if chosen.budget_bits is None:
        raise UsageError("gact_fx.estimate: budget_bits=None compresses nothing; give the bits that you think of")
    if chosen.max_gradient_noise is not None and not noise:
        raise UsageError("gact_fx.estimate: max_gradient_noise takes a measurement; pass noise=True beside it")
    if not isinstance(optimizer_states, int) or optimizer_states < 0:
        raise UsageError(
            f"gact_fx.estimate: optimizer_states must be a whole number of at least 0, got {optimizer_states!r}"
        )
    nbytes, inner, loss, plan = memory_nbytes(memory), unwrapped(model), loss_fn or default_loss, None
    if noise:
        plan = inspect(compile_by(copy.deepcopy(inner), chosen, None, Samples([batch], loss))).plan
    return make_estimate(Subject.of(inner, batch, loss, chosen, plan=plan, optimizer_states=optimizer_states), nbytes)


def _session(model: Callable[..., Any], config: Config, plan: Plan | None, asked: Mapping[str, Any] | None) -> Session:
    name = ""
    if isinstance(model, nn.Module):
        name = model_fingerprint([(key, tuple(p.shape)) for key, p in model.named_parameters()])
    stated = {**config.stated(), **(asked or {})}
    if plan is not None:
        problems = [*_misfits(plan, config, name), *(_spent(plan, stated) if asked is not None else ())]
        for problem in problems:
            raise UsageError(f"gact_fx.compile: {problem}")
        plan = plan.reseeded(config.seed) if "seed" in stated else plan
    regions = None
    if config.budget_bits is not None:
        regions = EagerRegions(config.eager_bits, config.seed, config.min_elements, lambda: owned_by(model))
    title = getattr(model, "__name__", type(unwrapped(model)).__name__)
    return Session(config, name, plan, regions, title)


def _misfits(plan: Plan, config: Config, name: str) -> Iterator[str]:
    """Why ``plan`` does not go with the model of that fingerprint, or with how the model is compiled."""
    if plan.model and name and plan.model != name:
        yield (
            f"the plan was made for another model (parameters {plan.model}, this model has {name}); "
            "profile this one with sample_batches, or compile without plan="
        )
    if config.budget_bits is None:
        yield "budget_bits=None turns compression off, and plan= would do nothing; leave one of them out"
    if plan.recompute != config.recompute:
        yield f"the plan was made for recompute={plan.recompute!r}, got recompute={config.recompute!r}; pass the plan's"
    # bfloat16 codes have neither groups nor dither.
    tensors = (tensor for graph in plan.graphs for tensor in graph.tensors)
    codes = [tensor.code for tensor in tensors if tensor.code is not None and tensor.code.bits <= 8]
    for option, anything in (("group_size", None), ("rounding", "auto")):
        wanted, found = getattr(config, option), {getattr(code, option) for code in codes}
        others = sorted(found - {wanted})
        if wanted != anything and others:
            yield f"the plan was made for {option}={others[0]!r}, got {option}={wanted!r}; leave it out"


def _spent(plan: Plan, stated: Mapping[str, Any]) -> Iterator[str]:
    """Why budgets that are asked for do nothing: a plan has spent its own.

    Another one only matters where the model is profiled again.
    """
    if stated.get("profile_every") is not None:
        return
    for option in BUDGETS:
        value = stated.get(option)
        if value is not None and not (option == "budget_bits" and value == plan.budget_bits):
            yield (
                f"{option}={value!r} does nothing beside plan=, whose bits are chosen; leave one of them out, or pass "
                "profile_every to plan again"
            )
