"""What profiling found out about one graph: sensitivities, from any number of steps and ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gact_fx.passes.encodings import GraphAnalysis
from gact_fx.plan import graph_fingerprint
from gact_fx.planning.budget import GraphTensors
from gact_fx.records import Sensitivity


@dataclass
class GraphProfile:
    """Sensitivities of one graph, by key, of every backward pass seen; ``runs`` is the most of these in one step."""

    analysis: GraphAnalysis
    found: dict[str, list[Sensitivity]] = field(default_factory=dict)
    runs: int = 1

    def add(self, analysis: GraphAnalysis, sensitivities: dict[str, Sensitivity]) -> None:
        """Add one backward pass, measured on the graph of ``analysis``, by slot name."""
        for tensor in analysis.saved:
            if tensor.name in sensitivities:
                self.found.setdefault(tensor.key, []).append(sensitivities[tensor.name])

    def tensors(self) -> GraphTensors:
        """What the budget is shared out among."""
        means = {key: Sensitivity.mean(values) for key, values in self.found.items()}
        return GraphTensors(graph_fingerprint(self.analysis.saved), self.analysis, means, self.runs)


def merged(several: Sequence[Mapping[str, GraphProfile]]) -> dict[str, GraphProfile]:
    """The profiles of several ranks as one: what each measured of a graph counts alike."""
    found: dict[str, GraphProfile] = {}
    for profiles in several:
        for key, profile in profiles.items():
            known = found.setdefault(key, GraphProfile(profile.analysis))
            known.runs = max(known.runs, profile.runs)
            for name, sensitivities in profile.found.items():
                known.found.setdefault(name, []).extend(sensitivities)
    return found
