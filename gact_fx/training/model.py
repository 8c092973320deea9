"""A model as the caller holds it, whose calls run what its session says."""

import contextlib
import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from gact_fx.graphs import recurrent_modules
from gact_fx.graphs.dynamo import compile_apart, compiled_call, new_code_name, own_call, set_compiled_call
from gact_fx.training.lifecycle import Lifecycle
from gact_fx.training.other_compilers import guard, unguard
from gact_fx.training.ranks import unwrapped
from gact_fx.training.session import Session, log
from gact_fx.training.unchanged import modules_of

_ATTRIBUTE = "_gact_fx_session"


def session_of(model: object) -> Session | None:
    """The session of a compiled model, or of a copy of one; None for others."""
    session = getattr(model, _ATTRIBUTE, None)
    return session if isinstance(session, Session) else None


def sessions_within(model: object) -> dict[str, Session]:
    """The sessions of a model's compiled modules, by these modules' names; '' is the model itself."""
    session = session_of(model)
    if session is not None or not isinstance(model, nn.Module):
        return {} if session is None else {"": session}
    found = ((name, session_of(module)) for name, module in model.named_modules())
    outermost: dict[str, Session] = {}
    for name, session in found:
        # Wrappers of all kinds hand on what they are asked for.
        if session is not None and session not in outermost.values():
            outermost[name] = session
    return outermost


def compiled_module(model: nn.Module) -> nn.Module | None:
    """The first module of a model, in the order of its names, that was compiled itself, or copied from one that was."""
    return next((module for module in model.modules() if _ATTRIBUTE in vars(module)), None)


def is_copy(model: object, session: Session) -> bool:
    """Whether a model with a session runs as if it had none: copies of modules keep what was planned, and no code."""
    if not isinstance(model, nn.Module):
        return False
    return all(compiled_call(module) is not session.lifecycle for module in model.modules())


@contextlib.contextmanager
def running(module: nn.Module, call: Callable[..., Any] | None) -> Iterator[nn.Module]:
    """Within, calls of ``module`` run ``call`` (None: its own code)."""
    before = compiled_call(module)
    set_compiled_call(module, call)
    try:
        yield module
    finally:
        set_compiled_call(module, before)


def owned_by(model: Callable[..., Any]) -> list[torch.Tensor]:
    """Parameters and buffers, of a function's modules too."""
    return [x for module in modules_of(unwrapped(model)) for x in (*module.parameters(), *module.buffers())]


def all_modules(model: Callable[..., Any]) -> list[nn.Module]:
    """The modules of a model, itself included; of a function those that it refers to."""
    return [within for module in modules_of(unwrapped(model)) for within in module.modules()]


def restore(model: Any) -> Any:
    """Undo what `Target.install` did to a model and to all modules in it; None where it did nothing.

    Returns the model; of a compiled function, the function.
    """
    if isinstance(model, _CompiledFunction):
        session = vars(model).pop(_ATTRIBUTE, None)
        recurrent_modules.remove(all_modules(model.__wrapped__))
        if isinstance(session, Session):
            session.lifecycle.close()
        return model.__wrapped__
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    # All of them: one in DDP may have been compiled with DDP, or before.
    found = [_restore_module(module) for module in modules]
    return model if any(found) else None


def _restore_module(module: nn.Module) -> bool:
    session, call = vars(module).pop(_ATTRIBUTE, None), compiled_call(module)
    if not isinstance(session, Session) and not isinstance(call, Lifecycle):
        return False
    if isinstance(call, Lifecycle):
        set_compiled_call(module, call.replaces)
        call.close()
    if isinstance(session, Session):
        session.lifecycle.close()
    unguard(module)
    recurrent_modules.remove(module.modules())
    return True


class Target:
    """The model as the caller holds it: a module compiled in place, or a function behind a callable of ours."""

    def __init__(self, model: Any, session: Session) -> None:
        self._original = unwrapped(model)
        self._session = session
        self._generation = 0
        # One name for all that is compiled of this model: sizes that vary while it is profiled do so in training.
        self._code_name = new_code_name()
        is_module = isinstance(model, nn.Module)
        self.model: Any = model if is_module else _CompiledFunction(model, session.lifecycle)
        self._before = compiled_call(self._original) if is_module else None
        self._session_before = session_of(self.model)

    def install(self) -> None:
        """Have the model run what its session says."""
        lifecycle = self._session.lifecycle
        if isinstance(self._original, nn.Module):
            lifecycle.replaces = self._before.replaces if isinstance(self._before, Lifecycle) else self._before
            set_compiled_call(self._original, lifecycle)
            lifecycle.stands_for(own_call(self._original, self._code_name))
            guard(self._original)
        else:
            lifecycle.stands_for(self._original)
        # Past nn.Module.__setattr__: a session is no submodule, and must not be pickled as one.
        object.__setattr__(self.model, _ATTRIBUTE, self._session)

    def compile(self, backend: str | Callable[..., Any]) -> Callable[..., Any]:
        """The model compiled with ``backend``, with what is to be done for its eager regions."""
        self._generation += 1
        function: Callable[..., Any] = self._original
        if isinstance(self._original, nn.Module):
            function = own_call(self._original, self._code_name)
        config, regions = self._session.config, self._session.eager_regions
        options: dict[str, Any] = {"dynamic": config.dynamic, "fullgraph": config.fullgraph}
        if isinstance(backend, str):
            options["options"] = config.inductor_patches or None
        else:
            if self._can_trace_recurrent():
                # A layer may be put in the place of another one later.
                options["recurrent"] = self._can_trace_recurrent
        compiled = compile_apart(function, backend, generation=self._generation, **options)
        return compiled if regions is None else regions.around(compiled)

    def _can_trace_recurrent(self) -> bool:
        """Whether the model has recurrent layers, all of which Dynamo can trace, as they are made to be."""
        modules = all_modules(self._original)
        recurrent_modules.install(modules)
        return recurrent_modules.can_trace(modules)

    def uncompiled(self) -> contextlib.AbstractContextManager[Any]:
        """Within, the model runs as it was before compile()."""
        # The module in DDP, not DDP: what is compared here is one rank's gradients.
        is_module = isinstance(self._original, nn.Module)
        return running(self._original, self._before) if is_module else contextlib.nullcontext(self._original)

    @contextlib.contextmanager
    def restored_on_failure(self) -> Iterator[None]:
        """An exception within leaves the model as it was before compile()."""
        try:
            yield
        except BaseException as error:
            if isinstance(self._original, nn.Module):
                set_compiled_call(self._original, self._before)
                if not isinstance(self._before, Lifecycle):
                    unguard(self._original)
                    recurrent_modules.remove(self._original.modules())
            object.__delattr__(self.model, _ATTRIBUTE)
            if self._session_before is not None:
                object.__setattr__(self.model, _ATTRIBUTE, self._session_before)
            log.warning(
                "%s: profiling failed with %s: the model is as it was before compile()",
                self._session.title, type(error).__name__,
            )  # fmt: skip
            raise


class _CompiledFunction:
    """A compiled plain callable."""

    def __init__(self, function: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__doc__ = function.__doc__
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A method, where the function was defined in a class: all instances share what is compiled."""
        return self if instance is None else types.MethodType(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the function alone, which for a method belongs to the copied object; copies run uncompressed."""
        return copy.deepcopy(self.__wrapped__, memo)
