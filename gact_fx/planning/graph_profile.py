"""What profiling found out about one graph: sensitivities, from any number of steps and ranks."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from gact_fx.graphs.step_memory import NOTHING, PairMemory
from gact_fx.passes.graph_analysis import GraphAnalysis
from gact_fx.plan import graph_fingerprint
from gact_fx.planning.budget import GraphTensors
from gact_fx.records import Sensitivity


@dataclass
class GraphProfile:
    """Sensitivities of one graph, by key, of every backward pass seen; ``runs`` is the most of these in one step.

    ``excess`` has by how many times codes of a tensor were found to add more than that, together with others';
    ``correction`` is what all codes of a plan together added, as a share of what was predicted with the excess.
    ``memory`` is what a run has in memory, with codes of the width for profiling; ``plain`` is the same under plain
    torch.compile, empty where nobody asks for it.
    """

    analysis: GraphAnalysis
    found: dict[str, list[Sensitivity]] = field(default_factory=dict)
    runs: int = 1
    excess: dict[str, float] = field(default_factory=dict)
    correction: float = 1.0
    memory: PairMemory = NOTHING
    plain: PairMemory = NOTHING

    def exceed(self, key: str, factor: float) -> None:
        """Codes of a tensor add ``factor`` times what is known so far."""
        self.excess[key] = self.excess.get(key, 1.0) * factor

    def add(self, analysis: GraphAnalysis, sensitivities: dict[str, Sensitivity]) -> None:
        """Add one backward pass, measured on the graph of ``analysis``, by slot name."""
        for tensor in analysis.saved:
            if tensor.name in sensitivities:
                self.found.setdefault(tensor.key, []).append(sensitivities[tensor.name])

    def tensors(self) -> GraphTensors:
        """What the budget is shared out among."""
        means = {k: Sensitivity.mean(values).exceeding(self.excess.get(k, 1.0)) for k, values in self.found.items()}
        key = graph_fingerprint(self.analysis.saved)
        return GraphTensors(key, self.analysis, means, self.runs, self.excess, self.correction)


Profiles = dict[str, GraphProfile]


def completed(profiles: Profiles, known: Profiles, running: Set[str]) -> Profiles:
    """``profiles`` of one step, and those ``known`` before of other graphs that are ``running`` in other steps."""
    return {key: known[key] for key in known if key in running and key not in profiles} | profiles


def merged(several: Sequence[Mapping[str, GraphProfile]]) -> Profiles:
    """The profiles of several ranks as one: what each measured of a graph counts alike."""
    found: Profiles = {}
    for profiles in several:
        for key, profile in profiles.items():
            known = found.setdefault(key, replace(profile, found={}, runs=1, excess={}))
            known.runs = max(known.runs, profile.runs)
            known.correction = max(known.correction, profile.correction)
            for name, factor in profile.excess.items():
                known.excess[name] = max(known.excess.get(name, 1.0), factor)
            for name, sensitivities in profile.found.items():
                known.found.setdefault(name, []).extend(sensitivities)
    return found
