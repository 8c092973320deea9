"""Runs passes: what is the same for all of them stands here, and in no pass.

A pass is ``function(graphs, context) -> result``. Its graphs are the joint graph until the partitioner has cut it, and
the pair after that. Later passes read in the `Context` what a pass has found.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from gact_fx.config import Config
from gact_fx.graphs.aot import GraphPair, JointGraph
from gact_fx.graphs.graph_text import graph_text
from gact_fx.graphs.step_memory import NOTHING, PairMemory
from gact_fx.passes.graph_analysis import GraphAnalysis
from gact_fx.passes.reads import Read
from gact_fx.passes.verify_graphs import verify_graphs
from gact_fx.plan import GraphPlan
from gact_fx.records import SavedTensor


@dataclass(frozen=True)
class Stage:
    """One pass as it ran: its seconds, the graphs that it edits, and where text is kept, these before and after."""

    name: str
    seconds: float
    edits: tuple[str, ...] = ()
    before: tuple[str, ...] | None = None
    after: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Context:
    """What the passes over one joint graph are told, and what they have found so far.

    ``find_plan`` gives the plan of a graph once it is known what the graph saves; ``is_profiling`` says that the graphs
    are to be recorded; ``keeps_text``, that stages keep the graphs' text. The other fields are results of passes.
    """

    config: Config
    find_plan: Callable[[GraphAnalysis], GraphPlan] | None = None
    is_profiling: bool = False
    keeps_text: bool = False
    # Cuts a copy of the joint graph for the sake of what would be saved if backward computed these products again.
    try_cut: Callable[[JointGraph, frozenset[str]], tuple[GraphPair, GraphAnalysis]] | None = None

    joint: JointGraph | None = None
    pair: GraphPair | None = None
    plain: PairMemory = NOTHING
    copies: frozenset[str] = frozenset()
    attention: frozenset[str] = frozenset()
    products: frozenset[str] = frozenset()
    is_free: bool = False
    replaced: Mapping[str, int] = field(default_factory=dict)
    saved: tuple[SavedTensor, ...] = ()
    analysis: GraphAnalysis = field(default_factory=GraphAnalysis)
    plan: GraphPlan = field(default_factory=lambda: GraphPlan("", ()))
    reads: tuple[Read, ...] = ()
    exact_masks: Mapping[str, fx.Node] = field(default_factory=dict)
    replayable: GraphPair | None = None
    exact: GraphPair | None = None
    exact_memory: PairMemory = NOTHING
    memory: PairMemory = NOTHING
    swapped: frozenset[str] = frozenset()
    stages: tuple[Stage, ...] = ()


@dataclass(frozen=True)
class Pass:
    """One pass: ``function(graphs, context)``.

    ``edits`` names the graphs that it changes ("joint", "forward", "backward"), ``gives`` the field of `Context` that
    its result goes to, ``when`` says whether it runs. What is ``unfinished`` leaves a pair that only the next pass
    makes consistent again.
    """

    name: str
    function: Callable[[Any, Context], Any]
    edits: tuple[str, ...] = ()
    gives: str = ""
    when: Callable[[Context], bool] = lambda context: True
    unfinished: bool = False


def run_passes(passes: Sequence[Pass], context: Context) -> Context:
    """Run ``passes`` in their order over ``context.joint`` or ``context.pair``; returns the context with their results.

    After every pass the graphs that it edits lose dead code and are linted, and the pair is verified. They are
    recompiled when all passes have run: passes read graphs, and never their code.

    Raises:
        GraphVerificationError: a pass broke a graph.
    """
    if context.try_cut is None:
        context = replace(context, try_cut=lambda joint, products: _try_cut(passes, joint, products, context))
    for each in passes:
        if each.when(context):
            context = _run(each, context)
    for module in _modules(context.pair or context.joint):
        module.recompile()
    return context


def _run(each: Pass, context: Context) -> Context:
    graphs = context.pair or context.joint
    keeps_text = context.keeps_text and bool(each.edits or each.gives == "pair")
    # Only what edits changes the text.
    before = next((stage.after for stage in reversed(context.stages) if stage.after), None)
    if keeps_text and before is None:
        before = _text(graphs)
    start = time.perf_counter()
    result = each.function(graphs, context)
    for label in each.edits:
        module: fx.GraphModule = getattr(graphs, label)
        module.graph.eliminate_dead_code()
        module.graph.lint()
    if isinstance(graphs, GraphPair) and each.edits and context.saved and not each.unfinished:
        verify_graphs(graphs, tuple(tensor.name for tensor in context.saved))
    seconds = time.perf_counter() - start
    after = _text(result if each.gives == "pair" else graphs) if keeps_text else None
    stage = Stage(each.name, seconds, each.edits, before if keeps_text else None, after)
    found = {each.gives: result} if each.gives else {}
    return replace(context, stages=(*context.stages, stage), **found)


def _try_cut(
    passes: Sequence[Pass], joint: JointGraph, products: frozenset[str], context: Context
) -> tuple[GraphPair, GraphAnalysis]:
    """The pair that a copy of ``joint`` is cut into by the passes behind the one that asks, and what it saves."""
    names = [each.name for each in passes]
    steps = passes[names.index("choose_products") + 1 : names.index("decide_eligibility") + 1]
    found = run_passes(steps, replace(context, joint=joint.copy(), products=products, keeps_text=False))
    assert found.pair is not None
    return found.pair, found.analysis


def _modules(graphs: GraphPair | JointGraph | None) -> tuple[fx.GraphModule, ...]:
    return (graphs.forward, graphs.backward) if isinstance(graphs, GraphPair) else (graphs.joint,) if graphs else ()


def _text(graphs: GraphPair | JointGraph | None) -> tuple[str, ...]:
    return tuple(graph_text(module.graph) for module in _modules(graphs))
