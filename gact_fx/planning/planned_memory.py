"""What a step would have in memory by a plan, from the graphs as they were profiled: no graph is rewritten for that."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from gact_fx.graphs.step_memory import Buffer, PairMemory, StepMemory
from gact_fx.passes.graph_analysis import freed, is_counted
from gact_fx.plan import Plan, TensorPlan
from gact_fx.planning.graph_profile import GraphProfile


def planned_memory(profiles: Mapping[str, GraphProfile], plan: Plan, between: int) -> StepMemory:
    """The step of all profiled graphs, ``between`` which eager PyTorch holds so many bytes.

    What the profiled graphs hold for backward has the size that the plan gives it. What they keep exact and the plan
    stores in codes is decoded where backward wants it. All else is as it was profiled.
    """
    known = [(profile, plan.graph(key)) for key, profile in profiles.items()]
    pairs = [_planned(profile, found.entries()) for profile, found in known if found is not None]
    return StepMemory.of(pairs, [profile.runs for profile, found in known if found is not None], between)


def plain_memory(profiles: Iterable[GraphProfile], between: int) -> StepMemory:
    """The same step under plain torch.compile."""
    profiles = list(profiles)
    return StepMemory.of([profile.plain for profile in profiles], [profile.runs for profile in profiles], between)


def _planned(profile: GraphProfile, entries: Mapping[str, TensorPlan]) -> PairMemory:
    unread = freed(profile.analysis, entries)
    stored: dict[str, int] = {}
    kept: dict[str, int] = {}
    whole = {tensor.name: tensor.storage_nbytes for tensor in profile.analysis.saved}
    for tensor, how in profile.analysis.pairs():
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

    buffers = (planned_one for buffer in profile.memory.buffers for planned_one in planned(buffer))
    return replace(profile.memory, buffers=tuple(buffers))
