"""Steps of training on tensors without data: what they allocate is known, and nothing is computed.

Private, tried with torch 2.13: ``torch._subclasses.fake_tensor`` with ``FakeTensorMode`` and ``FakeCopyMode`` (public
would be fake tensors in ``torch.compiler``), ``DataDependentOutputException`` and ``DynamicOutputShapeException``
there, ``torch.utils._python_dispatch.TorchDispatchMode`` (public but for the underscore),
``torch._C.DisableTorchFunctionSubclass`` (public would be the same in ``torch.overrides``), and Inductor's random
operators by name.
"""

import contextlib
import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from gact_fx.graphs.interpreter import GraphInterpreter
from gact_fx.graphs.tensors import storage_key
from gact_fx.graphs.trees import tree_leaves

T = TypeVar("T")
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


class Fakes:
    """Copies without data, which live in one world; ``with fakes:`` runs operators in it."""

    def __init__(self) -> None:
        self._mode: Any = FakeTensorMode(allow_non_fake_inputs=True)

    def copy(self, value: T, rows: Mapping[int, int] | None = None) -> T:
        """A deep copy of ``value``, all tensors in which are fake; first sizes are exchanged as ``rows`` says."""
        with _CopyMode(self._mode, rows or {}):
            return copy.deepcopy(value)

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors that a deep copy of ``value`` copies, parameters left aside."""
    found: list[torch.Tensor] = []
    with _CopyMode(FakeTensorMode(), {}, found):
        copy.deepcopy(value)
    return found


def rows_of(value: object) -> int | None:
    """The first size that most tensors in ``value`` have; None without any."""
    rows = Counter(x.shape[0] for x in tensors_in(value) if x.dim())
    return max(rows, key=lambda count: rows[count], default=None)


def needs_values(error: BaseException | None) -> bool:
    """Whether an operator whose result depends on values is the reason for ``error``."""
    while error is not None and not isinstance(error, _NEEDS_VALUES):
        error = error.__cause__ or error.__context__
    return error is not None


class _CopyMode(FakeCopyMode):  # type: ignore[misc, unused-ignore]
    def __init__(self, mode: Any, rows: Mapping[int, int], found: list[torch.Tensor] | None = None) -> None:
        super().__init__(mode)
        self._rows, self._found = rows, found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any = super().__torch_function__(func, types, args, kwargs)
        if func is not torch.Tensor.__deepcopy__:
            return result
        if self._found is not None:
            self._found.append(args[0])
        if result.dim() and result.shape[0] in self._rows:
            with torch._C.DisableTorchFunctionSubclass(), self.fake_mode:
                shape = (self._rows[result.shape[0]], *result.shape[1:])
                result = torch.empty(shape, dtype=result.dtype, device=result.device)
        return result


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators make within, fake ones too, for as long as these live.

    What is ``known`` counts nothing.
    """

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.live = self.peak = 0
        self._sizes = {storage_key(x): 0 for x in known}
        self._gone: set[int] | None = None
        self._is_paused = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compile within, as if this mode were not there."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_paused:
            self.add(result)
        return result

    def add(self, value: Any) -> None:
        """Count the storages of tensors that were made otherwise."""
        for x in tree_leaves(value):
            if isinstance(x, torch.Tensor) and storage_key(x) not in self._sizes:
                storage = x.untyped_storage()
                self._sizes[storage_key(x)] = storage.nbytes()
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage_key(x))
        self.reaches(self.live)

    def reaches(self, nbytes: int) -> None:
        """Take note that so many bytes are live for a moment."""
        self.peak = max(self.peak, nbytes)

    @contextlib.contextmanager
    def paused(self) -> Iterator[set[int]]:
        """Within, nothing is counted; gives the storages that were counted before, and are gone then."""
        before = self._is_paused, self._gone
        self._is_paused, self._gone = True, set()
        try:
            yield self._gone
        finally:
            self._is_paused, self._gone = before

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)
        if self._gone is not None:
            self._gone.add(key)


class FakeInterpreter(GraphInterpreter):
    """Runs a graph on fake tensors, freeing every value after its last use."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        make = _RANDOM.get(str(target))
        return super().call_function(target, args, kwargs) if make is None else make(*args, **kwargs)


def run_fake(graph: fx.GraphModule, arguments: list[Any]) -> Any:
    """The results of ``graph`` on fake ``arguments``, a list that is emptied."""
    return FakeInterpreter(graph).boxed_run(arguments)


def _random(size: Sequence[int], seed: torch.Tensor, mode: str, **options: Any) -> torch.Tensor:
    return torch.empty(list(size), device=seed.device)


def _randint(low: int, high: int, size: Sequence[int], seed: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.empty(list(size), dtype=torch.int64, device=seed.device)


_RANDOM: dict[str, Callable[..., torch.Tensor]] = {
    "prims.inductor_random.default": _random,
    "prims.inductor_randint.default": _randint,
}
