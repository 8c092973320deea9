"""Find the kept tensors of which a copy is held: views of memory that would stay for their few elements alone.

The first token of a sequence, which a classifier reads, is such a view of the whole sequence.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch

from gact_fx.graphs.aot import GraphPair, SavedValue
from gact_fx.graphs.operators import packet_of
from gact_fx.passes.graph_analysis import memory_order
from gact_fx.records import SavedTensor

# A copy is worth its time where a storage has so many times the bytes of what is kept of it.
LEAST_RATIO = 2


def find_copies(pair: GraphPair, saved: Sequence[SavedTensor], reasons: Mapping[str, str]) -> frozenset[str]:
    """The tensors, of those with ``reasons`` to be kept, whose copies are held instead of their storages."""
    values = {value.name: value for value in pair.saved_values()}
    by_storage: dict[int, list[SavedTensor]] = {}
    for tensor in saved:
        if reasons[tensor.name] and tensor.dtype is not None:
            by_storage.setdefault(tensor.storage, []).append(tensor)
    return frozenset(
        tensor.name
        for kept in by_storage.values()
        if 0 < LEAST_RATIO * sum(tensor.nbytes for tensor in kept) <= kept[0].storage_nbytes
        and all(_can_be_copied(tensor, values[tensor.name]) for tensor in kept)
        for tensor in kept
    )


def _can_be_copied(tensor: SavedTensor, value: SavedValue) -> bool:
    """Whether nobody else holds the memory, and a copy lies otherwise than the tensor does.

    Inductor takes a copy that lies like its source for the source. A user that reads by storage would read past it.
    """
    is_own = tensor.owner == "nobody" and tensor.boundary is None and value.source.op == "call_function"
    by_storage = any(packet_of(user) is torch.ops.aten.as_strided for user in value.placeholder.users)
    return is_own and not by_storage and any(a != b for a, b in _steps(tensor))


def _steps(tensor: SavedTensor) -> Iterator[tuple[int, int]]:
    """The strides from the slowest dimension to the fastest, each with the one that a copy has."""
    order = memory_order(tensor.stride)
    sizes = [tensor.shape[d] for d in order]
    dense = list(accumulate(reversed(sizes[1:]), lambda a, b: a * b, initial=1))[::-1]
    return zip((tensor.stride[d] for d in order), dense, strict=False)
