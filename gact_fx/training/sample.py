"""What ranks that train together exchange to agree on a plan."""

from dataclasses import dataclass

from gact_fx.breaks.eager_bytes import EagerBytes
from gact_fx.plan import Plan
from gact_fx.planning.graph_profile import GraphProfile


@dataclass(frozen=True)
class Sample:
    """What one rank brings: what it measured and nobody planned from (maybe nothing), and the plan it came with."""

    profiles: dict[str, GraphProfile]
    eager: EagerBytes
    minibatch_variance: float | None
    max_gradient_noise: float | None
    plan: Plan | None
    has_failed: bool
