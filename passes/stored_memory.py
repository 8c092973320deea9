"""What a pair would have in memory if its tensors were stored otherwise; no graph is rewritten for that."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from gact_fx.graphs.step_memory import Buffer, PairMemory
from gact_fx.passes.graph_analysis import GraphAnalysis, freed, is_counted
from gact_fx.plan import TensorPlan


def stored_memory(memory: PairMemory, analysis: GraphAnalysis, entries: Mapping[str, TensorPlan]) -> PairMemory:
    """``memory`` of a pair, whatever its tensors are stored in, if they are stored by a plan's ``entries``.

    What is held for backward has the size that the plan gives it. What the pair keeps exact and the plan stores in
    codes is decoded where backward wants it.
    """
    unread = freed(analysis, entries)
    stored: dict[str, int] = {}
    kept: dict[str, int] = {}
    whole = {tensor.name: tensor.storage_nbytes for tensor in analysis.saved}
    for tensor, how in analysis.pairs():
        nbytes = 0 if tensor.name in unread else how.nbytes(tensor, entries.get(tensor.key))
        if nbytes is not None:
            stored[tensor.name] = nbytes
        elif is_counted(tensor):
            kept[tensor.name] = tensor.storage_nbytes

    def planned(buffer: Buffer) -> Iterator[Buffer]:
        if not buffer.slots:
            yield buffer
            return
        # Of several kept ones in one storage, each has all of it.
        largest = max((kept.get(name, 0) for name in buffer.slots), default=0)
        held = replace(buffer, nbytes=largest + sum(stored.get(name, 0) for name in buffer.slots))
        was_kept = buffer.nbytes >= max(whole[name] for name in buffer.slots)
        if was_kept and held.nbytes < buffer.nbytes:
            plain = replace(buffer, slots=())
            yield replace(plain, end=buffer.left)
            yield replace(plain, start=buffer.wanted)
            held = replace(held, start=buffer.left)
        yield held

    buffers = (planned_one for buffer in memory.buffers for planned_one in planned(buffer))
    return replace(memory, buffers=tuple(buffers))
