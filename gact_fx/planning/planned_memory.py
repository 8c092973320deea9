"""What a step would have in memory by a plan, from the graphs as they were profiled: no graph is rewritten for that."""

from collections.abc import Iterable, Mapping

from gact_fx.graphs.step_memory import StepMemory
from gact_fx.passes.stored_memory import stored_memory
from gact_fx.plan import Plan
from gact_fx.planning.graph_profile import GraphProfile


def planned_memory(profiles: Mapping[str, GraphProfile], plan: Plan, between: int) -> StepMemory:
    """The step of all profiled graphs, ``between`` which eager PyTorch holds so many bytes.

    What the profiled graphs hold for backward is stored as the plan says; all else is as it was profiled.
    """
    known = [(profile, plan.graph(key)) for key, profile in profiles.items()]
    pairs = [
        stored_memory(profile.memory, profile.analysis, found.entries())
        for profile, found in known
        if found is not None
    ]
    return StepMemory.of(pairs, [profile.runs for profile, found in known if found is not None], between)


def plain_memory(profiles: Iterable[GraphProfile], between: int) -> StepMemory:
    """The same step under plain torch.compile."""
    profiles = list(profiles)
    return StepMemory.of([profile.plain for profile in profiles], [profile.runs for profile in profiles], between)
