"""What the report is made of, as a session knows it: which graphs, in which steps, and what there is to say of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gact_fx.breaks.eager_bytes import EagerBytes
from gact_fx.codec.operators import has_compiled_kernels
from gact_fx.diagnostics.memory_timeline import Timeline, step_timeline
from gact_fx.diagnostics.report_rows import Held, Row, eager_row, graph_rows
from gact_fx.diagnostics.steps import LARGEST, LAST, PREDICTED, StepSizes, step_sizes
from gact_fx.graphs.module_names import full_names
from gact_fx.passes.encodings import Keep
from gact_fx.planning.planned_memory import planned_memory
from gact_fx.training.lifecycle import State
from gact_fx.training.rewrite import RewrittenGraph
from gact_fx.training.run_counts import GraphRuns, StepRuns
from gact_fx.training.session import Session

_BY_CALL = "by model(...): a direct call of model.forward(...) runs uncompressed"


@dataclass(frozen=True)
class Collected:
    """``rows`` are those of the largest step, ``graphs`` its graphs and behind them those that only the last step ran;
    ``timeline`` is what is live in the largest step.
    """

    rows: tuple[Row, ...]
    graphs: tuple[RewrittenGraph, ...]
    timeline: Timeline
    steps: tuple[StepSizes, ...]
    note: str
    unforeseen: tuple[int, ...]


def collect(session: Session, module_names: Mapping[int, str]) -> Collected:
    """What the graphs hold that training runs; ``module_names`` by ``id`` of the model's modules."""
    if session.plan is not None and not session.graphs:
        rows = _predicted(session)
        timeline = Timeline(after=planned_memory(session.profiles, session.plan, session.eager_bytes().held))
        predicted = (step_sizes(PREDICTED, rows),) if rows else ()
        return Collected(rows, (), timeline, predicted, _note(session, rows), ())
    largest, last = session.run_counts.largest_step(), session.run_counts.last_step()
    has_run = bool(largest.graphs)
    if not has_run:
        largest = StepRuns(dict.fromkeys(session.graphs, GraphRuns()), largest.eager)
    graphs = [graph for graph in session.graphs if graph in largest.graphs]
    ordered = (*graphs, *(graph for graph in session.graphs if graph in last.graphs and graph not in graphs))
    names = tuple(_names(graph, module_names) for graph in ordered)
    rows = _step_rows(session, ordered, largest, names)
    steps = [step_sizes(LARGEST, rows)] if has_run else []
    if has_run and last != largest:
        steps.append(step_sizes(LAST, _step_rows(session, ordered, last, names)))
    unforeseen = tuple(index for index, graph in enumerate(ordered) if session.is_unforeseen(graph))
    runs = tuple(largest.graphs[graph].runs if graph in largest.graphs else 0 for graph in ordered)
    eager = EagerBytes.of(largest.eager, None)
    timeline = step_timeline(ordered, names, runs, (eager.plain, eager.held))
    return Collected(rows, ordered, timeline, tuple(steps), _note(session, rows), unforeseen)


def _step_rows(
    session: Session, graphs: Sequence[RewrittenGraph], step: StepRuns, names: Sequence[Mapping[str, str]]
) -> tuple[Row, ...]:
    """The rows of one step, of its graphs and of eager PyTorch between them."""
    rows: list[Row] = []
    regions = session.eager_regions
    for index, graph in enumerate(graphs):
        if graph not in step.graphs:
            continue
        profile = session.profiles.get(graph.plan.fingerprint)
        shares = regions.shares_of_runs if regions is not None else {}
        held = Held(
            graph.analysis,
            graph.plan,
            step.graphs[graph],
            names[index],
            {} if profile is None else profile.tensors().sensitivities,
            graph.swapped,
            {name: share for (of, name), share in shares.items() if of is graph},
        )
        rows += graph_rows(index, held)
    return (*rows, *(eager_row(i, tensor) for i, tensor in enumerate(step.eager)))


def _predicted(session: Session) -> tuple[Row, ...]:
    """The rows that the plan leads to on the graphs that were profiled, before any is compiled."""
    assert session.plan is not None
    rows: list[Row] = []
    for index, (key, profile) in enumerate(session.profiles.items()):
        plan = session.plan.graph(key)
        if plan is not None:
            found = profile.tensors()
            rows += graph_rows(index, Held(found.analysis, plan, GraphRuns(found.runs), measured=found.sensitivities))
    return tuple(rows)


def _names(graph: RewrittenGraph, module_names: Mapping[int, str]) -> Mapping[str, str]:
    pair = graph.replayable
    return full_names(pair.forward, module_names) | full_names(pair.backward, module_names)


def _note(session: Session, rows: Sequence[Row]) -> str:
    """What state the model is in, '' where it trains by a plan and there is nothing else to know."""
    if session.config.budget_bits is None:
        return "compression is off (budget_bits=None)"
    if session.lifecycle.state is State.FAILED:
        return (
            "uncompressed, since no training step could be measured (the log says why): mend that and compile again, "
            "or compile with sample_batches or plan="
        )
    if session.plan is None and not session.lifecycle.was_called:
        return (
            "no plan yet, since the compiled model was never called: run one training step, which is the sample, "
            f"{_BY_CALL}; gact_fx.estimate(model, batch) predicts memory before that"
        )
    if session.plan is None:
        return (
            "no plan yet: run one training step, which is the sample (if you have, torch.compile captured no graph, or "
            "compiled autograd ran backward; that needs sample_batches)"
        )
    if not session.graphs:
        predicted = session.predicted_sizes()
        by_plan = f" ({predicted})" if predicted else ""
        return f"a plan{by_plan}, and no graph compiled with it yet; run a training step, {_BY_CALL}"
    if all(row.encoding == Keep.label for row in rows if row.graph is not None):
        return "nothing to compress: report.table() has the reasons"
    if session.run_counts.backward_is_unseen:
        return (
            "no backward pass of these graphs was seen (compiled autograd runs them itself): bytes are those of one "
            "run of each graph"
        )
    return _slow_devices(session)


def _slow_devices(session: Session) -> str:
    devices = sorted({device for graph in session.graphs for device in _devices(graph)})
    slow = [device for device in devices if device not in ("cpu", "cuda") or not has_compiled_kernels(device)]
    if not slow:
        return ""
    how = "fused by Inductor" if session.config.inner == "inductor" and session.config.fuse != "off" else "unfused"
    return (
        f"no compiled operators for {', '.join(slow)}: PyTorch code serves, {how}, with the same results; "
        "cpu and cuda have them where gact_fx was built with a C++ compiler, or nvcc, without GACT_FX_NO_EXT"
    )


def _devices(graph: RewrittenGraph) -> set[str]:
    values = [value.source.meta["val"] for value in graph.replayable.saved_values()]
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}
