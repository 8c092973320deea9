"""One compiled model: its configuration, its plan, and the graphs seen so far."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gact_fx.aot import GraphPair
from gact_fx.config import Config
from gact_fx.driver import Driver, Stage
from gact_fx.passes import Item, allocate_bits
from gact_fx.plan import GraphPlan, Plan, TensorPlan, graph_fingerprint, slot_seed
from gact_fx.records import GraphAnalysis

log = logging.getLogger("gact_fx")


@dataclass(frozen=True)
class GraphRecord:
    """One rewritten graph pair, with what was found and decided."""

    pair: GraphPair
    analysis: GraphAnalysis
    plan: GraphPlan
    stages: tuple[Stage, ...]


@dataclass
class GraphProfile:
    """Sensitivities of one graph, summed over the backward passes seen."""

    analysis: GraphAnalysis
    totals: dict[str, float] = field(default_factory=dict)
    count: int = 0

    def add(self, analysis: GraphAnalysis, sensitivities: Mapping[str, float]) -> None:
        """Add one backward pass, measured on the graph of ``analysis``, by slot name."""
        for tensor in analysis.saved:
            if tensor.name in sensitivities:
                self.totals[tensor.key] = self.totals.get(tensor.key, 0.0) + sensitivities[tensor.name]
        self.count += 1

    def mean(self, key: str) -> float | None:
        """Mean sensitivity of the tensor with this key, None where it was never measured."""
        return self.totals[key] / self.count if self.count and key in self.totals else None


class Session:
    """State of one compiled model, from the first sample to the running plan.

    ``on_plan`` is called once, when the plan is made from profiles.
    """

    def __init__(self, config: Config, model: str = "", plan: Plan | None = None) -> None:
        self.config = config
        self.model = model
        self.plan = plan
        self.plan_was_given = plan is not None
        self.profiles: dict[str, GraphProfile] = {}
        self.records: list[GraphRecord] = []
        self.progress: Callable[[int], None] = lambda count: None
        self.announce: Callable[[int], None] = lambda count: None
        self.on_plan: Callable[[], None] = lambda: None

    def profile(self, analysis: GraphAnalysis) -> GraphProfile:
        """The profile of the graph that saves what ``analysis`` says, new or known."""
        key = graph_fingerprint(analysis.saved)
        return self.profiles.setdefault(key, GraphProfile(analysis))

    def make_plan(self) -> Plan:
        """Allocate bits over all profiled graphs together, and run the plan from now on."""
        assert self.config.budget_bits is not None
        chosen = allocate(self.profiles, self.config)
        self.plan = Plan(self.config.budget_bits, self.config.group_size, self.model, chosen)
        total = sum(len(graph.tensors) for graph in chosen)
        log.info("planned %d saved tensors in %d graphs at %s bits", total, len(chosen), self.config.budget_bits)
        if not total:
            log.warning("nothing to compress: no saved tensor is eligible; gact_fx.inspect(model) gives the reasons")
        self.on_plan()
        return self.plan

    def rewrite(self, pair: GraphPair, channels_last: frozenset[str]) -> GraphPair:
        """Analyse ``pair``, rewrite it by the plan, and record it."""
        driver = Driver(pair, self.config)
        analysis = driver.analyze(channels_last)
        plan = self._graph_plan(analysis)
        driver.rewrite(analysis, plan)
        self.records.append(GraphRecord(pair, analysis, plan, tuple(driver.stages)))
        return pair

    def cache_key(self) -> str:
        """Identifies what a rewritten graph depends on, beside the graph itself."""
        return hashlib.sha256(repr((self.config, self.plan)).encode()).hexdigest()

    def _graph_plan(self, analysis: GraphAnalysis) -> GraphPlan:
        """The plan's entry for this graph, completed where the plan does not know it."""
        key = graph_fingerprint(analysis.saved)
        found = self.plan.graph(key) if self.plan is not None else None
        if found is None and self.plan_was_given and analysis.quantized() and not self.records:
            known = ", ".join(g.fingerprint for g in self.plan.graphs) if self.plan else ""
            raise ValueError(
                f"gact_fx.compile: the plan does not fit this model: it has no graph {key} (it has {known}); "
                "profile again with sample_batches, or compile without plan="
            )
        if found is None and analysis.quantized():
            log.warning("graph %s was not profiled: every tensor in it gets the same width", key)
        default = allocate({key: GraphProfile(analysis)}, self.config)[0]
        if found is None:
            return default
        entries = {**default.entries(), **found.entries()}
        chosen = []
        for tensor, how in analysis.quantized():
            entry = entries[tensor.key]
            fits = how.exact_allowed if entry.bits is None else entry.bits >= how.min_bits
            chosen.append(entry if fits else default.entries()[tensor.key])
        return GraphPlan(key, tuple(chosen))

    # The plan is worth copying and saving with a model; compiled graphs are not.

    def __reduce__(self) -> tuple[Any, ...]:
        return Session, (self.config, self.model, self.plan)


def allocate(profiles: Mapping[str, GraphProfile], config: Config) -> tuple[GraphPlan, ...]:
    """Widths for all tensors of all graphs under one budget."""
    assert config.budget_bits is not None
    slots = [(key, p, t, how) for key, p in profiles.items() for t, how in p.analysis.quantized()]
    bits: list[int | None]
    if config.adaptive:
        items = [
            Item(
                t.numel,
                t.dtype,
                p.mean(t.key),
                how.mask_numel,
                exact_nbytes=t.storage_nbytes if how.exact_allowed else None,
                min_bits=how.min_bits,
            )
            for _, p, t, how in slots
            if t.dtype is not None
        ]
        bits = allocate_bits(items, config.budget_bits, config.group_size)
    else:
        bits = [max(int(config.budget_bits), how.min_bits) for _, _, _, how in slots]
    plans: dict[str, list[TensorPlan]] = {key: [] for key in profiles}
    for (key, p, t, _), width in zip(slots, bits, strict=True):
        seed = slot_seed(config.seed, key, t.key)
        plans[key].append(TensorPlan(t.key, width, seed, p.mean(t.key), config.rounding))
    return tuple(GraphPlan(key, tuple(tensors)) for key, tensors in plans.items())
