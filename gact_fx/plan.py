"""The plan: what was decided for every saved tensor of every graph, as plain data."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gact_fx.codec.layout import BFLOAT16_BITS, check_rounding
from gact_fx.records import Eligibility, SavedTensor, Sensitivity

FORMAT = 2


@dataclass(frozen=True)
class TensorPlan:
    """One saved tensor, by its key: ``bits`` per code (None: kept exact), slot seed, measured sensitivity, rounding and
    group size.

    ``sensitivity`` is GACT's c_l, in units of squared gradient: stochastic rounding in groups of 256 adds
    ``c_l / (2^bits - 1)^2`` to the variance of the gradient. None where it was not measured.
    ``merged``: the codes tell the mask `Eligibility.merges` as well.
    """

    key: str
    bits: int | None
    seed: int
    sensitivity: float | None
    rounding: str = "stochastic"
    group_size: int = 256
    merged: bool = False

    def __post_init__(self) -> None:
        if self.bits is not None:
            check_rounding("Plan", self.rounding, self.bits)

    def fits(self, tensor: SavedTensor, how: Eligibility) -> bool:
        """Whether a decision made for another graph can be kept to for ``tensor``."""
        if self.bits is None:
            return how.exact_allowed
        if self.merged and not how.merges:
            return False
        can_be_coded = self.bits != BFLOAT16_BITS or (tensor.dtype is not None and tensor.dtype.itemsize == 4)
        return self.bits >= how.min_bits and can_be_coded


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

    ``budget_bits`` and ``recompute`` are those of the configuration that it was made with; ``budget_bits`` is None
    where bytes or noise were the budget.
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
        here = set(saved_values(saved))
        best = max(self.graphs, key=lambda graph: len(here & set(graph.saved)), default=None)
        return best if best is not None and 2 * len(here & set(best.saved)) >= len(here) else None

    def choices(self) -> dict[tuple[str, str], tuple[int | None, str, int, bool]]:
        """Bits, rounding, group size and whether a mask is merged, by graph and tensor."""
        return {
            (g.fingerprint, t.key): (t.bits, t.rounding, t.group_size, t.merged) for g in self.graphs for t in g.tensors
        }

    def variance_on(self, sensitivities: Mapping[str, Mapping[str, Sensitivity]]) -> float | None:
        """The variance this plan would add at other sensitivities, by graph and key; None where one is missing."""
        terms = []
        for graph in self.graphs:
            for tensor in graph.tensors:
                if tensor.bits is None:
                    continue
                found = sensitivities.get(graph.fingerprint, {}).get(tensor.key)
                code = (tensor.bits, "dither" if tensor.rounding == "dither" else "stochastic", tensor.group_size)
                variances = {} if found is None else found.merged if tensor.merged else found.variances
                if code not in variances:
                    return None
                terms.append(graph.runs * variances[code])
        return math.fsum(terms)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan written by :meth:`save`.

        Raises:
            ValueError: the file is not a plan, or one of another format.
        """
        try:
            data = json.loads(Path(path).read_text())
            found = data.pop("format")
            if found != FORMAT:
                raise ValueError(f"it has format {found}, this version reads format {FORMAT}")
            return cls(**{**data, "graphs": tuple(_graph_plan(graph) for graph in data["graphs"])})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"gact_fx.Plan.load: {path} is not a plan of gact_fx ({error}); write one with plan.save"
            ) from error


def _graph_plan(data: dict[str, Any]) -> GraphPlan:
    # Plans of version 0.1 say whether a tensor shared its codes with others.
    tensors = tuple(TensorPlan(**{k: v for k, v in tensor.items() if k != "shared"}) for tensor in data["tensors"])
    return GraphPlan(data["fingerprint"], tensors, tuple(data["saved"]), data["runs"])


def saved_values(saved: tuple[SavedTensor, ...]) -> tuple[str, ...]:
    """Operators, dtypes and ranks of the activations that a graph saves; sizes are left out, so that any batch fits."""
    return tuple(f"{t.key} {t.dtype} {len(t.shape)}" for t in saved if t.owner == "nobody")


def graph_fingerprint(saved: tuple[SavedTensor, ...]) -> str:
    """A hash of `saved_values`."""
    return hashlib.sha256(";".join(saved_values(saved)).encode()).hexdigest()[:16]


def differences(plan: Plan, saved: tuple[SavedTensor, ...]) -> str:
    """What a graph saves and the nearest graph of ``plan`` does not, and the reverse, in words."""
    here = saved_values(saved)
    if not plan.graphs:
        return "it has no graphs"
    nearest = min(plan.graphs, key=lambda graph: len(set(graph.saved) ^ set(here)))
    unknown = [value for value in here if value not in nearest.saved]
    missing = [value for value in nearest.saved if value not in here]
    parts = [f"the model saves, and the plan does not know, {_shown(unknown)}"] if unknown else []
    parts += [f"the plan has, and the model does not save, {_shown(missing)}"] if missing else []
    return "; ".join(parts) or "the same tensors are saved in another order"


def _shown(values: list[str], limit: int = 5) -> str:
    named = ["{} ({}, {}-D)".format(*value.replace("torch.", "").split(" ")) for value in values[:limit]]
    return ", ".join(named) + (f" and {len(values) - limit} more" if len(values) > limit else "")


def model_fingerprint(parameters: list[tuple[str, tuple[int, ...]]]) -> str:
    """Names and shapes of a model's parameters."""
    return hashlib.sha256(repr(parameters).encode()).hexdigest()[:16] if parameters else ""


def slot_seed(seed: int, graph: str, key: str) -> int:
    """The seed of one saved tensor's noise: independent of the other tensors' and of where in the plan it stands."""
    digest = hashlib.sha256(f"{seed}/{graph}/{key}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
