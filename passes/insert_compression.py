"""Insert compress into forward: every saved tensor's blob takes the tensor's place.

Counts and order of forward's outputs and backward's inputs never change. Compression goes right after the last use in
forward, decompression (`read_masks`, `read_values`) right before the first in backward, so that values live briefly.
"""

from gact_fx.graphs.aot import GraphPair, SavedValue
from gact_fx.passes.encodings import Alias, Quantize
from gact_fx.passes.forward_editor import ForwardEditor
from gact_fx.passes.pipeline import Context
from gact_fx.passes.reads import Read


def insert_compression(pair: GraphPair, context: Context) -> tuple[Read, ...]:
    """Edit ``pair.forward`` in place, by the plan; returns what backward is to read, in the order of the slots.

    Raises:
        KeyError: the plan has no entry for a tensor that is to be quantized.
    """
    values = {value.name: value for value in pair.saved_values()}
    entries = context.plan.entries()
    aliases: dict[str, list[SavedValue]] = {}
    for how in context.analysis.encodings:
        if isinstance(how, Alias):
            aliases.setdefault(how.of, []).append(values[how.name])
    forward = ForwardEditor(pair, aliases)
    reads: list[Read] = []
    for tensor, how in context.analysis.pairs():
        entry = entries[tensor.key] if isinstance(how, Quantize) else None
        reads += how.write(values[how.name], entry, forward)
    return tuple(reads)
