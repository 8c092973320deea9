"""torch.compile with a backend that changes as training goes on, kept clear of Dynamo's limit of recompilations.

Past that limit Dynamo runs a frame uncompiled, hence uncompressed, and says so only in its own log.

Private, tried with torch 2.11 and 2.13:

- ``torch._dynamo.config.patch`` with ``recompile_limit`` and ``accumulated_recompile_limit``: for single compilations
  only where ``torch.compile`` does not know ``isolate_recompiles``, which is public and replaces it;
- ``torch._dynamo.config.allow_rnn`` (public would be the same in ``torch.compiler``);
- ``torch._dynamo.config.ignore_logger_methods``, by which logging does not break a graph (public would be a decorator
  of ``torch.compiler``);
- ``torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags``: by it torch 2.11 goes on with the graphs that it
  has when ``requires_grad`` of a parameter changes, whose gradient is then never there (torch 2.12 mended that);
- ``torch._dynamo.config.skip_nnmodule_hook_guards`` (public would be an option of ``torch.compile``);
- ``torch._dynamo.config.suppress_errors`` (public would be a getter in ``torch.compiler``);
- ``torch._dynamo.maybe_mark_dynamic``, and the attributes by which it marks a tensor (public would be an argument of
  ``torch.compile``);
- ``torch._dynamo.lookup_backend`` (public would be the same in ``torch.compiler``);
- ``torch._dynamo.exc.BackendCompilerFailed`` and ``TorchDynamoException`` (public would be classes of
  ``torch.compiler``);
- ``torch._dynamo.eval_frame._stance`` (public would be a getter beside ``torch.compiler.set_stance``);
- ``torch._C._current_graph_task_id``, by which ``torch.utils.checkpoint`` itself tells one backward pass from another
  (public would be a function of ``torch.autograd.graph``);
- ``nn.Module._compiled_call_impl`` and ``_call_impl`` (public: ``nn.Module.compile``, which can neither be undone nor
  take what it shall call);
- ``DistributedDataParallel._get_active_ddp_module`` (public would be the same without the underscore).
"""

import contextlib
import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import nn

_NEVER = 2**20
_CODE_NUMBERS = itertools.count()
_MISSES_THAWING = torch.torch_version.TorchVersion(torch.__version__) < "2.12"
# Packages whose frames lie between a call and the compilation that it leads to.
_OWN_ROOMS = ("torch", "gact_fx", "contextlib", "functools")
Backend = str | Callable[..., Any]


def compile_apart(
    function: Callable[..., Any],
    backend: Backend,
    *,
    generation: int = 1,
    recurrent: bool | Callable[[], bool] = False,
    **options: Any,
) -> Callable[..., Any]:
    """``torch.compile(function, backend=backend, **options)``, not held back by what was compiled of the same code
    before.

    Frames behind a graph break are one code object for all compilations of a model. ``generation`` says how many of
    these there have been, this one included: torch 2.11 and 2.12 count them together, and get as many times the limit.
    ``recurrent``: whether to trace nn.LSTM and the like, too; a function is asked in every call.

    A backend and the graphs that it compiles live as long as what is returned, although Dynamo's caches last.
    """
    can_isolate = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    if can_isolate:
        options["isolate_recompiles"] = True
    owner = None if isinstance(backend, str) else _Owner(backend)
    compiled: Any = torch.compile(function, backend=backend if owner is None else owner.lent(), **options)
    # Past the __setattr__ of a compiled module, which hands on to the module itself.
    vars(compiled)["owner"] = owner
    is_held_back = generation > 1 and not can_isolate
    silent = _said_once()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        config = torch._dynamo.config
        limit = (generation if is_held_back else 1) * config.recompile_limit
        ignored = _Unwritten([*config.ignore_logger_methods, *silent])
        allows = (recurrent() if callable(recurrent) else recurrent) or config.allow_rnn
        skips = config.skip_tensor_guards_with_matching_dict_tags and not _MISSES_THAWING
        changes = {"recompile_limit": limit, "ignore_logger_methods": ignored, "allow_rnn": allows}
        # A hook that was registered after the first call would not run.
        guards = {"skip_tensor_guards_with_matching_dict_tags": skips, "skip_nnmodule_hook_guards": False}
        with config.patch({**changes, **guards}):
            return compiled(*args, **kwargs)

    return call


class _Owner:
    """Owns a backend and the graphs that it compiled; Dynamo, which forgets nothing, gets functions that look here."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend
        self._graphs: list[Callable[..., Any]] = []

    def lent(self) -> Callable[..., Any]:
        """The backend for Dynamo."""
        owner = weakref.ref(self)

        def compile(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            found = owner()
            assert found is not None, "nothing runs code that was compiled for another owner"
            found._graphs.append(found._backend(*args, **kwargs))
            index = len(found._graphs) - 1

            def call(*args: Any, **kwargs: Any) -> Any:
                found = owner()
                assert found is not None, "nothing runs code that was compiled for another owner"
                return found._graphs[index](*args, **kwargs)

            return call

        return compile


def _said_once() -> set[Callable[..., Any]]:
    """What transformers warns of once, and breaks the graph with in every call: GPT-2's, between its head and its loss.

    A graph that is compiled does not say it.
    """
    module = sys.modules.get("transformers.utils.logging")
    method = getattr(module, "warning_once", None)
    return {method} if callable(method) else set()


class _Unwritten(dict[Any, Any]):
    """A set of functions that Dynamo can write down as JSON, empty: torch 2.11 reports that a set cannot be written."""

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        super().__init__()
        self.functions = frozenset(functions)

    def __contains__(self, function: object) -> bool:
        return function in self.functions

    def __iter__(self) -> Iterator[Any]:
        return iter(self.functions)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What calling ``module`` runs in the place of its own code, None if it runs that."""
    found: Callable[..., Any] | None = module._compiled_call_impl
    return found


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Have calls of ``module`` run ``call``, hooks included; None: its own code."""
    if call is None:
        # The class has the None.
        vars(module).pop("_compiled_call_impl", None)
    else:
        module._compiled_call_impl = call  # type: ignore[assignment, unused-ignore]


def new_code_name() -> str:
    """A name for `own_call` that no code had before: an ``id`` may come back, and with it the sizes that varied."""
    return f"call_{next(_CODE_NUMBERS)}"


def own_call(module: nn.Module, name: str) -> Callable[..., Any]:
    """What ``nn.Module.compile`` compiles, hooks included, behind a code object of its own with that ``name``.

    Dynamo skips frames inside torch.nn, so that compiling an nn.Sequential itself would silently compile nothing
    (torch 2.11 to 2.13), and counts recompilations per code object: with one for all models, the ninth would silently
    not be compiled. By the name of the code it remembers sizes, and those that vary become dynamic.
    """
    function: Callable[..., Any] = module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=name)
    return call


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def is_exporting() -> bool:
    """Whether ``torch.export`` traces; Dynamo asks when it comes here.

    In code that Dynamo traces, torch 2.11 takes ``torch.compiler.is_exporting()`` for true whatever it traces for.
    """
    return torch.compiler.is_exporting()


def without_recompile_limits() -> Any:
    """Within, Dynamo compiles however often a frame was compiled already."""
    return torch._dynamo.config.patch(recompile_limit=_NEVER, accumulated_recompile_limit=_NEVER)


def lookup_backend(name: str) -> Callable[..., Any]:
    """One of torch.compile's backends, as a function."""
    return cast(Callable[..., Any], torch._dynamo.lookup_backend(name))


def is_of_backend(error: BaseException) -> bool:
    """Whether a backend failed to compile a graph, whatever it was given."""
    return isinstance(error, torch._dynamo.exc.BackendCompilerFailed)


def is_of_dynamo(error: BaseException) -> bool:
    """Whether Dynamo failed to trace or compile."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException)


def cause_within_backend(error: BaseException) -> BaseException | None:
    """What a backend raised, where it was that which ended a compilation."""
    return error.inner_exception if isinstance(error, torch._dynamo.exc.BackendCompilerFailed) else None


def has_run_code(since: CodeType) -> bool:
    """Whether what Dynamo compiles now is called from Python code other than its own, behind the frame of ``since``:
    code of the model, which a second call would run a second time.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not since:
        room = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if room not in _OWN_ROOMS:
            return True
        frame = frame.f_back
    return False


def hides_errors() -> bool:
    """Whether what a backend raises is logged and the code runs without it."""
    return bool(torch._dynamo.config.suppress_errors)


@contextlib.contextmanager
def first_sizes_vary(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within, Dynamo traces the first size of ``tensors`` as one that varies, if the code that reads them lets it."""
    # Whoever has marked sizes of a tensor has decided.
    marked = [x for x in tensors if not any(map(_is_mark, vars(x)))]
    for x in marked:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    try:
        yield
    finally:
        for x in marked:
            for name in list(filter(_is_mark, vars(x))):
                delattr(x, name)


def _is_mark(name: str) -> bool:
    return name.startswith(("_dynamo", "_has_dynamo"))


def active_ddp() -> Any:
    """The DistributedDataParallel module that runs forward now, None if there is none."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call, unused-ignore]


def is_forced_eager() -> bool:
    """Whether the caller has asked for eager PyTorch, by ``torch.compiler.set_stance("force_eager")``."""
    return bool(torch._dynamo.eval_frame._stance.stance == "force_eager")


def in_backward() -> bool:
    """Whether a backward pass calls this: checkpointing runs forward again within it."""
    return bool(torch._C._current_graph_task_id() != -1)
