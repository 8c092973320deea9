"""The plan of a step: under ``budget_bytes``, the one whose peak of activations keeps to them.

What is held between forward and backward is never more than what is live at the peak, and the wider the codes, the
higher is both. So the budget of what is held is looked for with which the predicted peak is right below the limit.
Where the narrowest codes would not do, the plan is one of ``budget_bits``: bad gradients would not bring the peak down.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gact_fx.breaks.eager_bytes import EagerBytes
from gact_fx.config import Config
from gact_fx.graphs.step_memory import PairMemory, StepMemory
from gact_fx.options import allowed_nbytes
from gact_fx.plan import Plan
from gact_fx.planning.budget import choose_plan
from gact_fx.planning.graph_profile import GraphProfile
from gact_fx.planning.planned_memory import plain_memory, planned_memory

log = logging.getLogger("gact_fx")
# Halvings of what is between the narrowest codes and the limit.
TRIES = 7
# A peak that is so many times the budget is worth a warning.
SLACK = 1.02
# Of what makes the peak, so many are named.
MOST_NAMED = 3


def choose_step_plan(
    profiles: Mapping[str, GraphProfile],
    config: Config,
    model: str,
    minibatch_variance: float | None,
    eager: EagerBytes,
    *,
    squared_norm: float | None = None,
    warns: bool = True,
) -> Plan:
    """The plan for all profiled graphs of a step, ``eager`` regions between them; the rest as for `choose_plan`."""
    graphs = [profile.tensors() for profile in profiles.values()]

    def plan_of(config: Config, warns: bool) -> Plan:
        return choose_plan(
            graphs, config, model, minibatch_variance,
            squared_norm=squared_norm, warns=warns, eager_excess=eager.excess,
        )  # fmt: skip

    if config.budget_bytes is None:
        return plan_of(config, warns)

    def holding(nbytes: int, warns: bool = False) -> Plan:
        return plan_of(replace(config, budget_bytes=max(nbytes - eager.held, 1)), warns)

    def memory_of(plan: Plan) -> StepMemory:
        return planned_memory(profiles, plan, eager.held)

    limit = _limit(profiles, config.budget_bytes, eager)
    if memory_of(holding(limit)).activations <= limit:
        return holding(limit, warns)
    least = memory_of(holding(1))
    if least.activations <= limit:
        return holding(_held_nbytes(holding, memory_of, least.held, limit), warns)
    if warns and least.held <= limit:
        log.warning("%s", _why_not(least, limit, config))
    usual = memory_of(plan_of(replace(config, budget_bytes=None), False))
    return holding(min(usual.held, limit), warns)


def why_above_budget(
    profiles: Mapping[str, GraphProfile],
    config: Config,
    plan: Plan,
    memories: Sequence[tuple[str, PairMemory]],
    eager: EagerBytes,
) -> str:
    """What to say where a step needs more than ``config.budget_bytes`` by the ``memories`` of its rewritten graphs.

    These have the fingerprints of the graphs. '' where the budget is kept, and where the plan never could keep it.
    """
    if config.budget_bytes is None:
        return ""
    runs = [profiles[key].runs if key in profiles else 1 for key, _ in memories]
    found = StepMemory.of([memory for _, memory in memories], runs, eager.held).activations
    limit = _limit(profiles, config.budget_bytes, eager)
    if found <= SLACK * limit or planned_memory(profiles, plan, eager.held).activations > limit:
        return ""
    return (
        f"activations peak at {found} bytes in a step, more than budget_bytes={limit}: the graphs that the plan led to "
        f"need more than was predicted of it; a smaller budget_bytes, such as {limit * limit // found}, helps"
    )


def _limit(profiles: Mapping[str, GraphProfile], budget_bytes: int | str, eager: EagerBytes) -> int:
    return allowed_nbytes(budget_bytes, plain_memory(profiles.values(), eager.plain).activations)


def _held_nbytes(holding: Callable[[int], Plan], memory_of: Callable[[Plan], StepMemory], low: int, limit: int) -> int:
    """The most bytes from ``low`` on, which are few enough, that may be held so that the peak is below ``limit``."""
    high = limit
    for _ in range(TRIES):
        middle = (low + high) // 2
        if memory_of(holding(middle)).activations <= limit:
            low = middle
        else:
            high = middle
    return low


def _why_not(least: StepMemory, limit: int, config: Config) -> str:
    waiting, others = least.largest_moment()
    named = ", ".join(f"{b.nbytes} of {b.op}{f' in {b.module}' if b.module else ''}" for b in others[:MOST_NAMED])
    held = sum(b.nbytes for b in waiting)
    return (
        f"budget_bytes={limit} cannot be kept at the peak of a step: with every tensor at its least width "
        f"{least.activations} bytes of activations are live at a time, {held} of them held for backward and the others "
        f"needed meanwhile ({named}); the codes take at most {config.budget_bits:g} bits an element instead. Use a "
        "smaller batch, a larger budget, or where most of it is held recompute='full'"
    )
