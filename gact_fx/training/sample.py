"""What ranks that train together exchange to agree on a plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from gact_fx.breaks.eager_bytes import EagerBytes
from gact_fx.plan import Plan
from gact_fx.planning.graph_profile import GraphProfile


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """The mean of those that are not None; None where there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Sample:
    """What one rank brings: what it measured and nobody planned from (maybe nothing), and the plan it came with."""

    profiles: dict[str, GraphProfile]
    eager: EagerBytes
    minibatch_variance: float | None
    squared_norm: float | None
    max_gradient_noise: float | None
    plan: Plan | None
    has_failed: bool
    # The fingerprints of the graphs that run by a plan that this rank has not been given.
    running: frozenset[str] = frozenset()


def running_of(samples: Sequence[Sample]) -> frozenset[str]:
    """The graphs that run on any rank."""
    return frozenset[str]().union(*(sample.running for sample in samples))
