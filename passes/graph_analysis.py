"""What the analyses found in one pair of graphs: every saved tensor, and how it is stored."""

from dataclasses import dataclass

from gact_fx.passes.encodings import Encoding, Quantize
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
    kept: dict[int, int] = {}
    stored = 0
    for tensor, how in analysis.pairs():
        if isinstance(how, Quantize):
            continue
        nbytes = how.nbytes(tensor, None)
        if nbytes is not None:
            stored += nbytes
        elif is_counted(tensor):
            kept[tensor.storage] = tensor.storage_nbytes
    return sum(kept.values()) + stored
