"""The plan: what was decided for every saved tensor of every graph, as plain data."""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gact_fx.codec.by_place import count_places, runs_of
from gact_fx.codec.code import Code
from gact_fx.codec.layout import check_rounding
from gact_fx.errors import UsageError, UsageTypeError
from gact_fx.records import SavedTensor, Sensitivity

FORMAT = 3


@dataclass(frozen=True)
class TensorPlan:
    """One saved tensor, by its key: its ``code`` (None: kept exact) and measured sensitivity.

    ``sensitivity`` is GACT's c_l, in units of squared gradient: stochastic rounding in groups of 256 adds
    ``c_l / (2^bits - 1)^2`` to the variance of the gradient. None where it was not measured.
    ``merged``: the codes tell one of the tensor's masks as well. ``stored``: they are codes of its "values", of its
    values "bare" of the masks that backward can take from them again, or of the "coefficients" that backward makes of
    them. ``excess``: codes of its values, tried together with all others, added so many times what was measured of it.
    ``reason``: why no code would do, where that was found, or why the code has one width.
    """

    key: str
    code: Code | None
    sensitivity: float | None = None
    merged: bool = False
    stored: str = "values"
    excess: float = 1.0
    reason: str = ""

    def __post_init__(self) -> None:
        if self.code is not None:
            check_rounding("Plan", self.code.rounding, self.code.bits)
            runs_of(self.code.by_place)

    @property
    def bits(self) -> float | None:
        """Width of the code, in the mean over places; None where kept exact."""
        return None if self.code is None else self.code.mean_bits

    def fits(self, tensor: SavedTensor) -> bool:
        """Whether the rows of ``tensor`` have as many groups as the code has widths by place, where it has some."""
        code = self.code
        return code is None or not code.by_place or tensor.row_numel == count_places(code.by_place) * code.group_size

    def of_one_width(self) -> "TensorPlan":
        """The entry with the mean of its widths by place, rounded down, in all places."""
        assert self.code is not None
        code = replace(self.code, bits=math.floor(self.code.mean_bits), by_place="")
        return replace(self, code=code, reason="one width, since its widths by place are for rows of another length")

    def within(self, length: int) -> "TensorPlan":
        """The entry for a tensor whose channels have ``length`` elements: groups are to lie in one of them."""
        return self if self.code is None else replace(self, code=self.code.within(length))

    def reseeded(self, seed: int, graph: str) -> "TensorPlan":
        """The entry of the graph of that fingerprint with the noise of ``seed``."""
        code = None if self.code is None else replace(self.code, seed=tensor_seed(seed, graph, self.key))
        return replace(self, code=code)

    def to_data(self) -> dict[str, Any]:
        """The entry as it is saved."""
        code = asdict(self.code) if self.code is not None else asdict(Code(0)) | {"bits": None}
        return {
            "key": self.key, **code,
            "sensitivity": self.sensitivity, "merged": self.merged, "stored": self.stored, "excess": self.excess,
            "reason": self.reason,
        }  # fmt: skip

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "TensorPlan":
        """The entry from what `to_data` gave."""
        code = Code(
            data["bits"], data["rounding"], data["group_size"], data["seed"],
            data.get("by_place", ""), data.get("per_channel", False),
        )  # fmt: skip
        stored = data["merged"], data.get("stored", "values"), data.get("excess", 1.0), data.get("reason", "")
        return cls(data["key"], None if data["bits"] is None else code, data["sensitivity"], *stored)


@dataclass(frozen=True)
class GraphPlan:
    """One graph, recognised by the fingerprint of what it saves; ``saved`` spells out what that is.

    ``runs`` is how often it ran in a step when it was profiled: graphs with equal fingerprints count as one.
    """

    fingerprint: str
    tensors: tuple[TensorPlan, ...]
    saved: tuple[str, ...] = ()
    runs: int = 1

    def entries(self) -> dict[str, TensorPlan]:
        """The entries by key."""
        return {entry.key: entry for entry in self.tensors}


@dataclass(frozen=True)
class Plan:
    """The decisions for a whole model, saved as JSON. ``model`` is the fingerprint of its parameters, '' if unknown.

    ``budget_bits`` (None where bytes or noise were the budget) and ``recompute`` are those of its configuration.
    ``variance`` is what compression was predicted to add to the gradient's variance, ``minibatch_variance`` what the
    gradient varies by from batch to batch, both in units of squared gradient, None where not measured.
    """

    budget_bits: float | None
    model: str
    graphs: tuple[GraphPlan, ...]
    recompute: str = "auto"
    variance: float | None = None
    minibatch_variance: float | None = None

    def graph(self, fingerprint: str) -> GraphPlan | None:
        return next((g for g in self.graphs if g.fingerprint == fingerprint), None)

    def nearest(self, saved: tuple[SavedTensor, ...]) -> GraphPlan | None:
        """The graph that saves most of what ``saved`` does, None where none saves half of it.

        A model that is traced anew, because its sizes vary, may be cut a little differently.
        """
        here = set(signature(saved))
        best = max(self.graphs, key=lambda graph: len(here & set(graph.saved)), default=None)
        return best if best is not None and 2 * len(here & set(best.saved)) >= len(here) else None

    def reseeded(self, seed: int) -> "Plan":
        """The same decisions with other noise, that of ``Config.seed``."""
        graphs = tuple(
            replace(g, tensors=tuple(t.reseeded(seed, g.fingerprint) for t in g.tensors)) for g in self.graphs
        )
        return replace(self, graphs=graphs)

    def choices(self) -> dict[tuple[str, str], tuple[Code | None, bool, str]]:
        """Codes, their seeds aside, and what they are of, by graph and tensor."""
        return {
            (g.fingerprint, t.key): (None if t.code is None else replace(t.code, seed=0), t.merged, t.stored)
            for g in self.graphs
            for t in g.tensors
        }

    def variance_on(self, sensitivities: Mapping[str, Mapping[str, Sensitivity]]) -> float | None:
        """The variance this plan would add at other sensitivities, by graph and key; None where one is missing."""
        terms = []
        for graph in self.graphs:
            for tensor in graph.tensors:
                if tensor.code is None:
                    continue
                found = sensitivities.get(graph.fingerprint, {}).get(tensor.key)
                if tensor.stored != "values" and found is not None:
                    found = found.others.get(tensor.stored)
                variance = None if found is None else found.variance(tensor.code, merged=tensor.merged)
                if variance is None:
                    return None
                terms.append(graph.runs * variance)
        return math.fsum(terms)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(self.to_json() + "\n")

    def to_json(self) -> str:
        """The plan as it is saved."""
        graphs = [{**vars(graph), "tensors": [t.to_data() for t in graph.tensors]} for graph in self.graphs]
        return json.dumps({"format": FORMAT, **vars(self), "graphs": graphs}, indent=1)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a plan written by :meth:`save`.

        Raises:
            TypeError: ``path`` is no path.
            ValueError: the file is not a plan, or one of another format.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise UsageTypeError(f"gact_fx.Plan.load: a plan is read from a path, got {type(path).__name__}")
        return cls.from_json(Path(path).read_text(), str(path))

    @classmethod
    def from_json(cls, text: str, source: str = "the text") -> "Plan":
        """The plan from what `to_json` gave; ``source`` names the text in errors.

        Raises:
            ValueError: it is not a plan, or one of another format.
        """
        try:
            data = json.loads(text)
            found = data.pop("format")
            if found != FORMAT:
                raise UsageError(f"it has format {found}, this version reads format {FORMAT}")
            return cls(**{**data, "graphs": tuple(_graph_plan(graph) for graph in data["graphs"])})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UsageError(
                f"gact_fx.Plan.load: {source} is not a plan of gact_fx ({error}); write one with plan.save"
            ) from error


def same_keys(saved: tuple[SavedTensor, ...], plan: GraphPlan) -> frozenset[str]:
    """The keys that mean the same tensor in a graph and in the one that ``plan`` was made for.

    Keys number the results of an operator: where one graph saves more of these, a number stands for another tensor.
    """
    here, there = (Counter(value.split("#")[0] for value in values) for values in (signature(saved), plan.saved))
    operators = {tensor.key: tensor.key.split("#")[0] for tensor in saved}
    return frozenset(key for key, operator in operators.items() if here[operator] == there[operator])


def _graph_plan(data: dict[str, Any]) -> GraphPlan:
    tensors = tuple(TensorPlan.from_data(tensor) for tensor in data["tensors"])
    return GraphPlan(data["fingerprint"], tensors, tuple(data["saved"]), data["runs"])


def signature(saved: tuple[SavedTensor, ...]) -> tuple[str, ...]:
    """Operators and dtypes of the activations that a graph saves; shapes are left out, so that any batch fits.

    Sorted: in which order they are saved depends on how they are laid out.
    """
    return tuple(sorted(f"{t.key} {t.dtype}" for t in saved if t.owner == "nobody"))


def graph_fingerprint(saved: tuple[SavedTensor, ...]) -> str:
    """A hash of `signature`."""
    return hashlib.sha256(";".join(signature(saved)).encode()).hexdigest()[:16]


def differences(plan: Plan, saved: tuple[SavedTensor, ...]) -> str:
    """What a graph saves and the nearest graph of ``plan`` does not, and the reverse, in words."""
    here = signature(saved)
    if not plan.graphs:
        return "it has no graphs"
    nearest = min(plan.graphs, key=lambda graph: len(set(graph.saved) ^ set(here)))
    unknown = [value for value in here if value not in nearest.saved]
    missing = [value for value in nearest.saved if value not in here]
    parts = [f"the model saves, and the plan does not know, {_shown(unknown)}"] if unknown else []
    parts += [f"the plan has, and the model does not save, {_shown(missing)}"] if missing else []
    return "; ".join(parts) or "the same tensors are saved in another order"


def _shown(values: list[str]) -> str:
    named = ["{} ({})".format(*value.replace("torch.", "").split(" ")) for value in values[:5]]
    return ", ".join(named) + (f" and {len(values) - 5} more" if len(values) > 5 else "")


def model_fingerprint(parameters: list[tuple[str, tuple[int, ...]]]) -> str:
    """Names and shapes of a model's parameters."""
    return hashlib.sha256(repr(parameters).encode()).hexdigest()[:16] if parameters else ""


def tensor_seed(seed: int, graph: str, key: str) -> int:
    """The seed of one saved tensor's noise: independent of the other tensors' and of where in the plan it stands."""
    digest = hashlib.sha256(f"{seed}/{graph}/{key}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
