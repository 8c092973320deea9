"""Runs the passes on one pair of graphs: times them, verifies what they made, keeps the text of stages that edit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from gact_fx.codec.operators import has_compiled_kernels
from gact_fx.config import Config
from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.compilers import decompositions
from gact_fx.passes.decide_eligibility import decide_eligibility
from gact_fx.passes.defer_recomputation import defer_recomputation
from gact_fx.passes.expose_decisions import expose_decisions
from gact_fx.passes.find_saved_tensors import find_saved_tensors
from gact_fx.passes.fuse_codec import fuse_codec
from gact_fx.passes.insert_compression import insert_compression
from gact_fx.passes.recompute_attention import recompute_attention
from gact_fx.passes.swap_codes import swap_codes
from gact_fx.passes.verify_graphs import verify_graphs
from gact_fx.plan import GraphPlan
from gact_fx.records import GraphAnalysis

Result = TypeVar("Result")
log = logging.getLogger("gact_fx")


@dataclass(frozen=True)
class Stage:
    """One pass as it ran: its seconds, and where text is kept and the pass edits, both graphs before and after."""

    name: str
    seconds: float
    before: tuple[str, str] | None = None
    after: tuple[str, str] | None = None


@dataclass
class Driver:
    """The passes over one ``pair``; ``stages`` grows as they run, with the graphs' text if ``keeps_text``."""

    pair: GraphPair
    config: Config
    keeps_text: bool = False
    stages: list[Stage] = field(default_factory=list)

    def analyze(self, channels_last: frozenset[str] = frozenset()) -> GraphAnalysis:
        """Passes 2 to 5: what is saved, and how it may be stored."""
        self._run("recompute_attention", lambda: recompute_attention(self.pair), edits=True)
        self._run("expose_decisions", lambda: expose_decisions(self.pair), edits=True)
        saved = self._run("find_saved_tensors", lambda: find_saved_tensors(self.pair))
        return self._run(
            "decide_eligibility",
            lambda: decide_eligibility(
                self.pair,
                saved,
                min_elements=self.config.min_elements,
                channels_last=channels_last,
                trust_unknown=self.config.unknown_operators == "compress",
            ),
        )

    def insert(self, analysis: GraphAnalysis, plan: GraphPlan) -> None:
        """Passes 9 to 11: carry ``plan`` out on the pair, in place."""
        slots = tuple(tensor.name for tensor in analysis.saved)
        self._run("insert_compression", lambda: insert_compression(self.pair, analysis, plan), edits=True)
        self._run("defer_recomputation", lambda: defer_recomputation(self.pair), edits=True)
        self._run("verify_graphs", lambda: verify_graphs(self.pair, slots))

    def swap(self, *, is_first: bool) -> frozenset[str]:
        """Pass 12, where the configuration asks for it: the slots whose blobs are in host memory between forward and
        backward. Where there are none, the first of a model's graphs says so.
        """
        if not self.config.swap:
            return frozenset()
        slots = tuple(value.name for value in self.pair.saved_values())
        moved = self._run("swap_codes", lambda: swap_codes(self.pair), edits=True)
        self._run("verify_graphs", lambda: verify_graphs(self.pair, slots))
        if is_first and not moved:
            log.warning(
                "swap=True does nothing here: it moves codes from a CUDA device to host memory, and none of these "
                "codes is on one (those of the CPU are in host memory already)"
            )
        return moved

    def fuse(self) -> None:
        """Pass 13, where the configuration or the device asks for it."""
        if self.config.inner == "inductor" and self.config.fuse != "off":
            self._run("fuse_codec", lambda: fuse_codec(self.pair, self._fuses, decompositions()), edits=True)

    def _fuses(self, device: torch.device) -> bool:
        return self.config.fuse == "on" or not has_compiled_kernels(device.type)

    def _run(self, name: str, run: Callable[[], Result], edits: bool = False) -> Result:
        is_kept = edits and self.keeps_text
        # Only what edits changes the text; making one takes as long as a pass.
        before = next((stage.after for stage in reversed(self.stages) if stage.after), None)
        if is_kept and before is None:
            before = self._text()
        start = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - start
        after = self._text() if is_kept else None
        self.stages.append(Stage(name, seconds, before if is_kept else None, after))
        return result

    def _text(self) -> tuple[str, str]:
        graphs = (self.pair.forward, self.pair.backward)
        forward, backward = (graph.print_readable(print_output=False) for graph in graphs)
        return forward, backward
