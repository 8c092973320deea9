"""One forward pass through eager regions: what autograd saved in it, and in whose memory that lies."""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from gact_fx.breaks.autograd_nodes import Treatment, Use
from gact_fx.breaks.graph_holdings import GraphHoldings, Storages
from gact_fx.codec.code import Code
from gact_fx.codec.packed_tensors import Packed
from gact_fx.errors import StepError
from gact_fx.graphs.tensors import StorageWeakRef, storage_key, version

# What makes of a parameter what is as large, and the same in every step but for the parameter's own change.
_COPIES = (
    "ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0",
    "CloneBackward0", "ExpandBackward0", "AliasBackward0",
)  # fmt: skip


@dataclass(frozen=True)
class EagerTensor:
    """One tensor that eager PyTorch saved in the latest step of training.

    ``code`` is None where it is kept exact, ``is_mask`` where its code is. Bytes count each storage and code once, and
    none that a graph holds as well.
    """

    use: Use | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    code: Code | None
    is_mask: bool
    bytes_before: int
    bytes_after: int


@dataclass
class Reads:
    """Whether backward has read anything that one forward pass saved."""

    any: bool = False


class Held:
    """What the hook put in a saved tensor's place: the tensor itself, or codes from which it is made again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: a node that saves its own result would otherwise hold itself, for ever if backward never runs.
        self.value: torch.Tensor | Packed = tensor.detach()
        self.producer = producer_of(tensor)
        self.requires_grad = tensor.requires_grad
        self.place: Hashable = None
        self.reads: Reads | None = None
        self.treatment = Treatment.EXACT
        self.scale: torch.Tensor | None = None
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.version = version(tensor)
        # The number of its storage in the forward pass.
        self.storage = -1

    def is_modified(self) -> bool:
        """Whether the tensor was written to after it was saved."""
        return isinstance(self.value, torch.Tensor) and version(self.value) != self.version

    def read(self) -> torch.Tensor:
        if not isinstance(self.value, Packed):
            if self.is_modified():
                # PyTorch's own check does not see through hooks.
                raise StepError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a {tuple(self.value.shape)} tensor is at version {version(self.value)}, expected {self.version}; "
                    "change it after backward, or a clone of it"
                )
            return self.value
        found = self.value.unpack()
        if self.scale is not None:
            return found * self.scale
        if self.treatment is Treatment.SIGN:
            return found.to(self.dtype)
        return found.log_() if self.treatment is Treatment.EXPONENTIAL else found


class ForwardPass:
    """One forward pass, and what was saved in it."""

    def __init__(self, inputs: list[torch.Tensor], owned: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.inputs = inputs
        self.reads = Reads()
        self.visits: Counter[Hashable] = Counter()
        self.storages = Storages()
        self.saved: list[Held] = []
        self.codes: dict[Hashable, tuple[StorageWeakRef, weakref.ref[Packed]]] = {}
        self.graphs = GraphHoldings(self.storages)
        self.runs_plan = False
        # Storages of what graphs made without a gradient, and of what graphs with a backward pass read.
        self.made: dict[int, StorageWeakRef] = {}
        self.read_by_graphs: set[int] = set()
        self._owned = owned

    @functools.cached_property
    def owned(self) -> frozenset[int]:
        """Storages that are there anyway: parameters, buffers and the batch."""
        plain = [x for x in (*self._owned(), *self.inputs) if x.layout is torch.strided]
        return frozenset(storage_key(x) for x in plain)

    def is_owned(self, x: torch.Tensor) -> bool:
        """Whether ``x`` is a parameter, a buffer, part of the batch, or a parameter that was cast or laid out anew."""
        if storage_key(x) in self.owned:
            return True
        node = x.grad_fn
        while node is not None and node.name() in _COPIES:
            sources = [source for source, _ in node.next_functions if source is not None]
            if len(sources) != 1:
                return False
            node = sources[0]
            if hasattr(node, "variable"):
                return isinstance(node.variable, torch.nn.Parameter)
        return False

    def eager_tensors(self, uses: Mapping[Hashable, Use]) -> Iterator[EagerTensor]:
        """What was saved, and how; ``uses`` by place."""
        before = set(self.graphs.storages)
        # Codes are told apart by their blobs, storages by their number.
        after: set[torch.Tensor | int] = {*self.graphs.exact}
        for held in self.saved:
            code, storage = held.value, held.storage
            nbytes = 0 if storage in before else self.storages.sizes[storage]
            before.add(storage)
            key = code.blob if isinstance(code, Packed) else storage
            is_new = key not in after
            after.add(key)
            size = code.blob.numel() if isinstance(code, Packed) else self.storages.sizes[storage]
            is_mask = isinstance(code, Packed) and code.dtype is torch.bool
            how = code.code if isinstance(code, Packed) else None
            use = uses.get(held.place)
            yield EagerTensor(use, held.shape, held.dtype, how, is_mask, nbytes, size if is_new else 0)


def producer_of(x: torch.Tensor) -> str:
    """The name of the autograd node that made ``x``, or ''."""
    return x.grad_fn.name() if x.grad_fn is not None else ""
