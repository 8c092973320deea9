"""Ranks that train one model together, under DistributedDataParallel or ``fully_shard``, and agree on its plan.

Every rank profiles its own data, and plans from what all of them measured. They can only meet where all are sure to
come by: before a forward pass of the whole model that synchronises gradients. There every rank counts alike, whatever
happened on it (a NaN, a graph of another size, passes of its own outside of DDP); an agreement is due before every one
until there is a plan, and then after every step that is profiled again. Rounding noise depends on the values that are
rounded, so it is independent from rank to rank although the plan, with its seeds, is the same.

Whether a graph runs that the plan was made without is known to the rank that runs it alone. The ranks tell each other
where all of them have reason to: in the step after the first one by a plan, and after the first step in which the model
has other modes (training or evaluation, what has a gradient), which all ranks set alike. Telling each other in every
step would cost time, and have a rank wait for ever whose loop has one step more than the others' have.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from gact_fx.errors import StepError
from gact_fx.graphs.dynamo import active_ddp
from gact_fx.planning.graph_profile import completed, merged
from gact_fx.training.sample import Sample, mean_of_known, running_of
from gact_fx.training.session import Session, log

T = TypeVar("T")
# Which modules are in training mode, none of which may be, and which parameters have a gradient.
Modes = tuple[tuple[bool, ...], tuple[bool, ...]]
# Until it is said that other ranks are waited for, and until they are given up (PyTorch's own default for gloo).
SECONDS_IN_SILENCE = 60.0
TIMEOUT = timedelta(minutes=30)


class Ranks:
    """Has the ranks agree before a step of training in which an agreement is due.

    ``modules`` are those that the model may consist of. ``in_step``: whether what runs now counts as a step of
    training; ``is_sharded``: whether parameters are there only while forward and backward read them.
    """

    def __init__(self, session: Session, modules: Sequence[nn.Module]) -> None:
        self.in_step = True
        self.is_sharded = bool(_sharded(modules))
        self._session = session
        self._modules = modules
        self._group: dist.ProcessGroup | None = None
        self._hooked: WeakSet[nn.Module] = WeakSet()
        self._handles: list[RemovableHandle] = []
        # Since there is the present plan, with the present one.
        self._steps = 0
        self._is_over = False
        # What is due before the next step: to agree on a plan; or to tell each other which graphs run.
        self._meets_next = self._tells_next = False
        self._known_modes: set[Modes] = set()

    def before_call(self) -> None:
        """Watch the DDP module that the model is or is in, or meet here where the model is sharded.

        What checkpointing around the model runs again in backward is no step, and no place to meet.
        """
        if not dist.is_available() or not dist.is_initialized():
            return
        active = active_ddp()
        for module in filter(_is_ddp, self._modules):
            self._watch(module)
        sharded = _sharded(self._modules)
        self.is_sharded |= bool(sharded)
        if active is not None:
            self._watch(active)
        elif sharded and torch.is_grad_enabled():
            self._begin(lambda: _sharded_over(sharded[0]))
        elif self._hooked or self._group is not None:
            # A pass that the other ranks know nothing of; within DDP its hook says that it is a step after all.
            self.in_step = False

    def release(self) -> None:
        """Watch no DDP module any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._group = None

    def _watch(self, ddp: Any) -> None:
        if ddp in self._hooked:
            return
        self._hooked.add(ddp)

        def begin(*ignored: Any) -> None:
            self.in_step = torch.is_grad_enabled() and ddp.require_backward_grad_sync
            if self.in_step:
                self._begin(lambda: dist.get_process_group_ranks(ddp.process_group))

        self._handles.append(ddp.register_forward_pre_hook(begin))
        if active_ddp() is ddp:
            begin()

    def _begin(self, ranks: Callable[[], list[int]]) -> None:
        """A step of training that all ``ranks`` begin."""
        session, is_first = self._session, self._group is None
        self.in_step = True
        if self._group is None:
            self._group = dist.new_group(ranks(), TIMEOUT, "gloo", use_local_synchronization=True)
        self._steps += 1
        every = session.config.profile_every
        is_due = session.plan is None or (every is not None and self._steps % max(every, 2) == 1)
        if is_first or ((is_due or self._meets_next) and not self._is_over):
            self._meet(is_first)
        elif self._tells_next:
            self._tells_next = False
            self._profile_lacking(frozenset[str]().union(*self._gather(session.running())))
        if session.plan is not None:
            self._note_modes()

    def _note_modes(self) -> None:
        """Have the ranks tell each other which graphs run if the step that begins is the first one in these modes.

        That all is in evaluation mode says nothing: it may be one rank that evaluates the model with gradients.
        """
        modules = [within for module in self._modules for within in module.modules()]
        training = tuple(module.training for module in modules)
        wanted = tuple(p.requires_grad for module in self._modules for p in module.parameters())
        modes = (training if any(training) else (), wanted)
        self._tells_next |= modes not in self._known_modes
        self._known_modes |= {modes, ((), wanted)}

    def _profile_lacking(self, running: frozenset[str]) -> None:
        """Profile this step if the plan lacks any of the graphs that are ``running`` on some rank."""
        if self._session.profile_lacking(running):
            self._meets_next, self._steps = True, 0

    def _begin_plan(self) -> None:
        """This is the first step by a plan."""
        self._steps, self._tells_next = 1, True
        self._known_modes.clear()

    def _meet(self, is_first: bool) -> None:
        session = self._session
        self._meets_next = self._tells_next = False
        # What was recorded of the last step may wait for the next call.
        session.settle()
        samples = self._gather(session.sample(is_first))
        missing = [rank for rank, sample in enumerate(samples) if not sample.profiles]
        given = [sample for sample in samples if sample.plan is not None]
        if not missing:
            if _plan_together(session, samples, is_first):
                self._begin_plan()
        elif given:
            assert given[0].plan is not None
            session.adopt(given[0].plan)
            session.planned_from = given[0].profiles, given[0].eager
            self._begin_plan()
        elif any(sample.has_failed for sample in samples):
            self._is_over = True
            session.lifecycle.failed()
        elif len(missing) < len(samples):
            log.warning(
                "%s: rank %s could not profile its step; the next one is profiled instead",
                session.title, ", ".join(map(str, missing)),
            )  # fmt: skip
        self._profile_lacking(running_of(samples))

    def _gather(self, mine: T) -> list[T]:
        """What all ranks bring, in their order."""
        assert self._group is not None
        found: list[Any] = [None] * dist.get_world_size(self._group)
        message = (
            "rank %d has waited %.0f s for other ranks to begin a training step of this model, to agree on its plan"
        )
        timer = threading.Timer(SECONDS_IN_SILENCE, log.warning, (message, dist.get_rank(), SECONDS_IN_SILENCE))
        timer.daemon = True
        timer.start()
        try:
            dist.all_gather_object(found, mine, group=self._group)
        except RuntimeError as error:
            raise StepError(
                f"gact_fx: not all ranks began the same training step within {TIMEOUT}; a model that not all ranks run "
                "in every step cannot be planned together: pass the same plan= on all of them, compiled before DDP"
            ) from error
        finally:
            timer.cancel()
        return found


def _plan_together(session: Session, samples: Sequence[Sample], is_first: bool) -> bool:
    """Make the plan from what all ranks bring, the same on all of them; False where the plan there is stays."""
    session.minibatch_variance = mean_of_known([s.minibatch_variance for s in samples])
    session.squared_norm = mean_of_known([s.squared_norm for s in samples])
    asked = next((s.max_gradient_noise for s in samples if s.max_gradient_noise is not None), None)
    is_known = session.minibatch_variance is not None
    session.config = replace(session.config, max_gradient_noise=asked if is_known else None)
    session.profiles = merged([sample.profiles for sample in samples])
    if is_first:
        # Plans that the ranks made apart are nothing to compare with.
        session.plan = None
    else:
        # Not every graph runs in every step, nor on every rank.
        session.profiles = completed(session.profiles, session.planned_from[0], running_of(samples))
    # The budget has to do on the rank whose eager regions hold most.
    return session.make_plan(max((sample.eager for sample in samples), key=lambda eager: eager.held))


def _is_ddp(module: object) -> bool:
    if not dist.is_available():
        return False
    from torch.nn.parallel import DistributedDataParallel

    return isinstance(module, DistributedDataParallel)


def unwrapped(model: Any) -> Any:
    """The module in DDP, which Dynamo has to see itself: it skips frames inside torch.nn, like DDP's own."""
    return model.module if _is_ddp(model) else model


def without_sync(modules: Sequence[Any]) -> ExitStack:
    """Within, DDP modules among ``modules`` run without expecting ``.backward()`` to follow."""
    stack = ExitStack()
    for module in filter(_is_ddp, modules):
        stack.enter_context(module.no_sync())
    return stack


def _sharded(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of the modules that ``fully_shard`` was applied to."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in modules if isinstance(module, FSDPModule)]


def _sharded_over(module: nn.Module) -> list[int]:
    """The ranks that hold parts of the module's parameters."""
    from torch.distributed.tensor import DTensor

    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            ranks: list[int] = sorted(parameter.device_mesh.mesh.flatten().tolist())
            return ranks
    return list(range(dist.get_world_size()))
