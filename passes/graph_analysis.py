"""What the analyses found in one pair of graphs: every saved tensor, and how it is stored."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gact_fx.passes.encodings import Encoding, Quantize
from gact_fx.plan import TensorPlan
from gact_fx.records import SavedTensor


@dataclass(frozen=True)
class GraphAnalysis:
    """What the analyses found in one pair of graphs: both tuples in the order of forward's outputs."""

    saved: tuple[SavedTensor, ...] = ()
    encodings: tuple[Encoding, ...] = ()

    def pairs(self) -> list[tuple[SavedTensor, Encoding]]:
        """Every saved tensor with its encoding."""
        return list(zip(self.saved, self.encodings, strict=True))

    def quantized(self) -> list[tuple[SavedTensor, Quantize]]:
        """The tensors whose width is to be chosen."""
        return [(tensor, how) for tensor, how in self.pairs() if isinstance(how, Quantize)]


def is_counted(tensor: SavedTensor) -> bool:
    """Whether backward alone holds the tensor's memory, or may: parameters and the caller's inputs cost nothing."""
    return tensor.owner in ("nobody", "output")


def fixed_nbytes(analysis: GraphAnalysis) -> int:
    """Bytes that a graph holds whatever the plan: what is kept, masks and packed integers."""
    optional = {name for _, how in analysis.quantized() for name, _ in how.statistics}
    fixed = [(t, how) for t, how in analysis.pairs() if not isinstance(how, Quantize) and t.name not in optional]
    return _nbytes([(t, how.nbytes(t, None)) for t, how in fixed])


def freed(analysis: GraphAnalysis, entries: Mapping[str, TensorPlan]) -> set[str]:
    """The kept tensors that nobody reads by a plan's ``entries``."""
    stored = {key: entry.stored for key, entry in entries.items() if entry.code is not None}
    return {name for t, how in analysis.quantized() for name in how.freed(stored.get(t.key, "values"))}


def held_nbytes(analysis: GraphAnalysis, entries: Mapping[str, TensorPlan] | None) -> int:
    """Bytes that a graph holds for backward by a plan's ``entries``, or without compression, where these are None."""
    if entries is None:
        return _nbytes([(tensor, None) for tensor in analysis.saved])
    pairs, unread = analysis.pairs(), freed(analysis, entries)
    return _nbytes([(t, how.nbytes(t, entries.get(t.key))) for t, how in pairs if t.name not in unread])


def _nbytes(tensors: Iterable[tuple[SavedTensor, int | None]]) -> int:
    """Of tensors with the bytes stored in their place; None: kept, with all the storage that they lie in."""
    kept: dict[int, int] = {}
    stored = 0
    for tensor, nbytes in tensors:
        if nbytes is not None:
            stored += nbytes
        elif is_counted(tensor):
            kept[tensor.storage] = tensor.storage_nbytes
    return sum(kept.values()) + stored


def steps_of_rows(tensor: SavedTensor) -> tuple[int, ...]:
    """The strides, but for dimensions of one element, of which they say nothing: those of what lies in rows."""
    steps, in_rows = list[int](), 1
    for size, step in reversed(list(zip(tensor.shape, tensor.stride, strict=True))):
        steps.append(in_rows if size == 1 else step)
        in_rows = steps[-1] * size
    return tuple(reversed(steps))


def memory_order(stride: tuple[int, ...], *, channels_last: bool = False) -> tuple[int, ...]:
    """The dimensions from the slowest to the fastest."""
    if channels_last and len(stride) == 4:
        return (0, 2, 3, 1)
    return tuple(sorted(range(len(stride)), key=lambda d: (-stride[d], d)))
