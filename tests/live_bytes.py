"""Bytes of the tensors that are alive, counted operator by operator."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators return while it is entered; ``peak`` is the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and id(value.untyped_storage()) not in self._sizes:
                storage = value.untyped_storage()
                self._sizes[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, id(storage))
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result
