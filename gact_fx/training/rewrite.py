"""Rewrites one graph of a model: runs the passes over it, with what the plan says of what it saves."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gact_fx.codec.code import WIDTHS, Code
from gact_fx.codec.layout import BFLOAT16_BITS
from gact_fx.config import Config
from gact_fx.errors import UsageError
from gact_fx.graphs.aot import GraphPair, JointGraph
from gact_fx.graphs.step_memory import NOTHING, PairMemory
from gact_fx.passes.graph_analysis import GraphAnalysis
from gact_fx.passes.pipeline import Context, Pass, Stage, run_passes
from gact_fx.plan import GraphPlan, Plan, TensorPlan, differences, graph_fingerprint, same_keys, signature, tensor_seed
from gact_fx.planning.budget import GraphTensors, choose_plan

log = logging.getLogger("gact_fx")
# What profiling stores activations in: little enough to fit where training does, and near enough to the exact values.
PROFILE_BITS = 8
# The least width, the same for all tensors, with which a step trains.
TRAINING_BITS = 4


@dataclass(frozen=True, eq=False)
class RewrittenGraph:
    """One rewritten graph pair, with what was found and decided; others know the graph by it.

    ``replayable`` are the graphs as the passes left them, all on one device; those in ``pair`` belong to the inner
    compiler. ``swapped`` are the slots whose blobs these move to host memory. ``exact`` are the graphs before anything
    was stored in codes, where a pass has kept them. ``memory`` is what the pair has in memory while it runs,
    ``exact_memory`` the same before anything was stored in codes, ``plain`` the same under plain torch.compile, empty
    where nobody asks for it.
    """

    pair: GraphPair
    replayable: GraphPair
    analysis: GraphAnalysis
    plan: GraphPlan
    stages: tuple[Stage, ...]
    swapped: frozenset[str] = frozenset()
    exact: GraphPair | None = None
    memory: PairMemory = NOTHING
    exact_memory: PairMemory = NOTHING
    plain: PairMemory = NOTHING


def rewrite(joint: JointGraph, context: Context, passes: Sequence[Pass]) -> RewrittenGraph:
    """Cut ``joint`` and rewrite the pair by ``passes``."""
    done = run_passes(passes, replace(context, joint=joint))
    assert done.pair is not None and done.replayable is not None
    return RewrittenGraph(
        done.pair,
        done.replayable,
        done.analysis,
        done.plan,
        done.stages,
        done.swapped,
        done.exact,
        done.memory,
        done.exact_memory,
        done.plain,
    )


def narrow_bits(config: Config) -> int | None:
    """The width for a step that is measured on a few of its rows, None where it has `PROFILE_BITS`, too.

    Under ``budget_bytes``, where the plan's widths are not known yet, it is the least one. Under
    ``max_gradient_noise`` the step's own gradient is compared with the next one.
    """
    if config.max_gradient_noise is not None or config.budget_bits is None:
        return None
    wanted = TRAINING_BITS if config.budget_bytes is not None else max(math.floor(config.budget_bits), TRAINING_BITS)
    return wanted if wanted < PROFILE_BITS else None


def profiling_plan(analysis: GraphAnalysis, config: Config) -> GraphPlan:
    """All that may be compressed at one width, for a step that is recorded.

    Of tensors in which backward bends, and may have poles, it is not known yet what rounding does: they are in
    bfloat16, or where poles lie among usual numbers, or decisions may be taken from them again, or an operator reads
    them that may do anything, exact.
    """
    key = graph_fingerprint(analysis.saved)
    entries = []
    for tensor, how in analysis.quantized():
        decides = bool(how.unknown) or (how.coefficients is not None and how.coefficients.retakes)
        is_delicate = how.bends and (decides or not how.is_tame)
        bits = BFLOAT16_BITS if is_delicate and how.takes_bfloat16(tensor) else PROFILE_BITS
        code = Code(bits, seed=tensor_seed(config.seed, f"profile {key}", tensor.key))
        needs_exact = decides or how.has_poles or bits != BFLOAT16_BITS or not how.values_allowed
        is_exact = is_delicate and how.exact_allowed and needs_exact
        entries.append(TensorPlan(tensor.key, None if is_exact else code))
    return GraphPlan(key, tuple(entries))


def graph_plan(analysis: GraphAnalysis, plan: Plan | None, config: Config, *, must_fit: bool) -> GraphPlan:
    """The entry of ``plan`` for the graph that ``analysis`` is of, completed where the plan does not know it.

    Raises:
        UsageError: the plan knows neither the graph nor one that saves all that it does, and it ``must_fit``.
    """
    key = graph_fingerprint(analysis.saved)
    found = plan.graph(key) if plan is not None else None
    if found is None and plan is not None and analysis.quantized():
        found = plan.nearest(analysis.saved)
        # In eval() a model saves less than in training, for which the plan was made.
        knows_all = found is not None and set(signature(analysis.saved)) <= set(found.saved)
        if must_fit and not knows_all:
            raise UsageError(
                f"gact_fx.compile: the plan does not fit this model: {differences(plan, analysis.saved)}; "
                "profile again with sample_batches, or compile without plan="
            )
        outcome = "all its tensors get one width" if found is None else "it runs the plan of the nearest one"
        log.warning(
            "a graph that saves %s was not profiled: %s; sample_batches that run it, or profile_every, have it planned",
            _named(analysis), outcome,
        )  # fmt: skip
    assert config.budget_bits is not None
    alone = replace(
        config,
        adaptive=False,
        budget_bits=min(math.floor(config.budget_bits), WIDTHS[-1]),
        budget_bytes=None,
        max_gradient_noise=None,
    )
    default = choose_plan([GraphTensors(key, analysis, {})], alone, "", None).graphs[0]
    if found is None:
        return default
    same, others = same_keys(analysis.saved, found), default.entries()
    known = {key: entry for key, entry in found.entries().items() if key in same}
    chosen = []
    for tensor, how in analysis.quantized():
        entry = known.get(tensor.key, others[tensor.key])
        if not entry.fits(tensor):
            entry = entry.of_one_width()
        if how.order:
            entry = entry.within(tensor.numel // max(tensor.shape[how.order[-1]], 1))
        chosen.append(entry if how.admits(tensor, entry) else others[tensor.key])
    return GraphPlan(key, tuple(chosen), found.saved, found.runs)


def _named(analysis: GraphAnalysis) -> str:
    """The tensors of a graph whose widths are to be chosen, by the first and the last."""
    names = [f"{tensor.op} in {tensor.module}" if tensor.module else tensor.op for tensor, _ in analysis.quantized()]
    return names[0] if len(names) == 1 else f"{len(names)} tensors, from {names[0]} to {names[-1]},"
