"""What is live in the course of a training step, before compression and after it, as the passes weighed it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gact_fx.graphs.step_memory import Buffer, PairMemory, StepMemory
from gact_fx.training.rewrite import RewrittenGraph


@dataclass(frozen=True)
class Timeline:
    """The same step before and after."""

    before: StepMemory = field(default_factory=StepMemory)
    after: StepMemory = field(default_factory=StepMemory)


def step_timeline(
    graphs: Sequence[RewrittenGraph], names: Sequence[Mapping[str, str]], runs: Sequence[int], between: tuple[int, int]
) -> Timeline:
    """The step in which every graph runs as often as ``runs`` says, its modules by their full ``names``.

    ``between`` graphs, eager PyTorch holds so many bytes before and after.
    """
    exact = [_named(graph.exact_memory, known) for graph, known in zip(graphs, names, strict=True)]
    rewritten = [_named(graph.memory, known) for graph, known in zip(graphs, names, strict=True)]
    return Timeline(StepMemory.of(exact, runs, between[0]), StepMemory.of(rewritten, runs, between[1]))


def _named(memory: PairMemory, names: Mapping[str, str]) -> PairMemory:
    def named(buffer: Buffer) -> Buffer:
        return replace(buffer, module=names.get(buffer.module, buffer.module))

    return replace(memory, buffers=tuple(map(named, memory.buffers)))
