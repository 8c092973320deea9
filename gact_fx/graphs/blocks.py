"""Pointwise calls and sums of what they make, or a call of independent rows, as a function that runs block by block.

Private, tried with torch 2.11 and 2.13: ``torch.utils._python_dispatch._get_current_dispatch_mode_stack`` (public would
be a question whether somebody sees every operator that runs), and the module of AOTAutograd's own mode.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from gact_fx.graphs.operators import MAKES_MEMORY

# A tensor is cut into so many blocks, a large one into more that have about so many elements, and what has fewer bytes
# not at all.
FEW_BLOCKS, MOST_BLOCKS, BLOCK_NUMEL, LEAST_NBYTES = 16, 64, 2**18, 2**20
# In the first run of a graph, AOTAutograd looks whether custom operators return what they are given.
_AOT = "torch._functorch."
# What runs a few operators: it takes the arguments in one list, which it empties, and gives the results.
Run = Callable[[list[Any]], Any]
# The dimensions over which a result is a sum, and whether it keeps them.
Sum = tuple[Collection[int], bool]


class Blocks:
    """Calls of pointwise operators, and sums of what they make, as one function: of tensors, or numbers, a tuple.

    ``run`` makes the calls, of a block or of all. ``sums`` says of every result whether it is a sum. What is none has
    the shape of all that the calls make.
    """

    def __init__(self, name: str, run: Run, sums: Sequence[Sum | None]) -> None:
        self.__name__, self._run, self._sums = name, run, sums

    def __call__(self, *given: Any) -> Sequence[Any]:
        """The results."""
        return self.write(given, [])

    def write(self, given: Sequence[Any], over: Sequence[torch.Tensor]) -> Sequence[Any]:
        """The results, written where they fit to those of the tensors ``given`` that nobody else reads, ``over``."""
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        if not all(map(_is_plain, tensors)) or is_watched() or torch.is_grad_enabled():
            found: Sequence[Any] = self._run(list(given))
            return found
        shape = torch.broadcast_shapes(*(x.shape for x in tensors))
        most = min(max(FEW_BLOCKS, shape.numel() // BLOCK_NUMEL), MOST_BLOCKS)
        # The first dimension that is long enough. Of two elements the strides tell where they lie; of one they do not.
        dimension = max(range(len(shape)), key=lambda d: (min(shape[d] // 2, most), -d))
        size, count = shape[dimension], max(min(shape[dimension] // 2, most), 1)
        axes = [_axis(dimension, how) for how in self._sums]
        free = [x for x in over if x.shape == shape and x.untyped_storage().nbytes() == x.nbytes]
        results: list[torch.Tensor] = []
        for low, high in ((size * at // count, size * (at + 1) // count) for at in range(count)):
            parts = self._run([_part(x, dimension - len(shape), size, low, high) for x in given])
            if not results:
                made = zip(parts, axes, strict=True)
                results = [torch.zeros_like(x) if axis is None else _like(x, axis, size, free) for x, axis in made]
            for result, part, axis in zip(results, parts, axes, strict=True):
                if axis is None:
                    result += part
                else:
                    result.narrow(axis, low, high - low).copy_(part)
        return tuple(results)


class Rows:
    """A call of the operator ``target``, of one tensor whose rows do not depend on each other, some rows at a time.

    What the operator has in memory within, PyTorch's own decomposition of it say, is then as small.
    """

    def __init__(self, target: Any) -> None:
        self.__name__, self._target = f"rows_of_{target.__name__.split('.')[0]}", target
        setattr(self, MAKES_MEMORY, True)

    def __call__(self, x: torch.Tensor, *rest: Any) -> Any:
        """What ``target`` gives: a tensor, or several."""
        size = len(x)
        count = min(x.numel() // BLOCK_NUMEL, size)
        if count < 2 or not _is_plain(x) or is_watched() or torch.is_grad_enabled():
            return self._target(x, *rest)
        results: list[torch.Tensor] = []
        for low, high in ((size * at // count, size * (at + 1) // count) for at in range(count)):
            found = self._target(x[low:high], *rest)
            parts = [found] if isinstance(found, torch.Tensor) else found
            results = results or [_like(part, 0, size, []) for part in parts]
            for result, part in zip(results, parts, strict=True):
                result[low:high] = part
        return results[0] if isinstance(found, torch.Tensor) else tuple(results)


def is_watched() -> bool:
    """Whether a mode of the caller's, which counts operations say, sees every operator that runs."""
    return any(not type(mode).__module__.startswith(_AOT) for mode in _get_current_dispatch_mode_stack())


def _is_plain(x: torch.Tensor) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter)


def _axis(dimension: int, how: Sum | None) -> int | None:
    """Where a result has the ``dimension`` of what it is made of; None where it is summed over."""
    if how is None:
        return dimension
    dims, keeps = how
    return None if dimension in dims else dimension - (0 if keeps else sum(d < dimension for d in dims))


def _part(x: Any, dimension: int, size: int, low: int, high: int) -> Any:
    """The block of ``x`` in a dimension that counts from the last, or all of it, where it is the same in all blocks."""
    has_blocks = isinstance(x, torch.Tensor) and x.dim() >= -dimension and x.shape[dimension] == size
    return x.narrow(dimension, low, high - low) if has_blocks else x


def _like(part: torch.Tensor, axis: int, size: int, free: list[torch.Tensor]) -> torch.Tensor:
    """A tensor for blocks such as ``part`` in dimension ``axis``, which has that ``size``; a ``free`` one if it can be.

    Its dimensions are in memory in the order of a block's.
    """
    shape = [size if dimension == axis else n for dimension, n in enumerate(part.shape)]
    strides, step = [0] * len(shape), 1
    for dimension in sorted(range(len(shape)), key=lambda d: (part.stride(d), part.shape[d], -d)):
        strides[dimension] = step
        step *= shape[dimension]
    for at, x in enumerate(free):
        is_alike = list(x.shape) == shape and list(x.stride()) == strides
        if is_alike and x.dtype == part.dtype and x.device == part.device:
            return free.pop(at)
    return torch.empty_strided(shape, strides, dtype=part.dtype, device=part.device)
