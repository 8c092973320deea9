"""The plan: what was decided for every saved tensor of every graph, as plain data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gact_fx.codec_layout import check_rounding
from gact_fx.records import SavedTensor

FORMAT = 1


@dataclass(frozen=True)
class TensorPlan:
    """One saved tensor, by its key: ``bits`` per code (None: kept exact), slot seed, measured sensitivity, rounding.

    ``sensitivity`` is GACT's c_l, in units of squared gradient: the tensor adds ``c_l / (2^bits - 1)^2`` to the
    variance of the gradient. None where it was not measured.
    """

    key: str
    bits: int | None
    seed: int
    sensitivity: float | None
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        if self.bits is not None:
            check_rounding("Plan", self.rounding, self.bits)


@dataclass(frozen=True)
class GraphPlan:
    """One graph, recognised by the fingerprint of what it saves."""

    fingerprint: str
    tensors: tuple[TensorPlan, ...]

    def entries(self) -> dict[str, TensorPlan]:
        """The entries by key."""
        return {entry.key: entry for entry in self.tensors}


@dataclass(frozen=True)
class Plan:
    """The decisions for a whole model, saved as JSON. ``model`` is the fingerprint of its parameters, '' if unknown."""

    budget_bits: float
    group_size: int
    model: str
    graphs: tuple[GraphPlan, ...]

    def graph(self, fingerprint: str) -> GraphPlan | None:
        return next((g for g in self.graphs if g.fingerprint == fingerprint), None)

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
    return GraphPlan(data["fingerprint"], tuple(TensorPlan(**tensor) for tensor in data["tensors"]))


def graph_fingerprint(saved: tuple[SavedTensor, ...]) -> str:
    """Operators, dtypes and ranks of the activations that a graph saves; sizes are left out, so that any batch fits."""
    text = ";".join(f"{t.key} {t.dtype} {len(t.shape)}" for t in saved if t.owner == "nobody")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def model_fingerprint(parameters: list[tuple[str, tuple[int, ...]]]) -> str:
    """Names and shapes of a model's parameters."""
    return hashlib.sha256(repr(parameters).encode()).hexdigest()[:16] if parameters else ""


def slot_seed(seed: int, graph: str, key: str) -> int:
    """The seed of one saved tensor's noise: independent of the other tensors' and of where in the plan it stands."""
    digest = hashlib.sha256(f"{seed}/{graph}/{key}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
