"""What the runner does for every pass."""

from __future__ import annotations

import inspect
import sys
import time
from typing import Any

import pytest
import torch
from conftest import Mixed, Trace, analyze, insert, mixed_batch
from torch import nn

import gact_fx
from gact_fx.codec.code import Code
from gact_fx.config import Config
from gact_fx.graphs.aot import GraphPair
from gact_fx.passes import PIPELINE
from gact_fx.passes.pipeline import Context, Pass, run_passes
from gact_fx.passes.verify_graphs import GraphVerificationError
from gact_fx.plan import GraphPlan, TensorPlan
from gact_fx.training.session import Session


def test_a_new_pass_runs_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file and a line: the pass sees what those before it found, and its stage is in the report."""
    seen: list[tuple[bool, bool]] = []

    def count_saved(pair: GraphPair, context: Context) -> None:
        seen.append((bool(context.saved), bool(context.analysis.encodings)))

    at = [each.name for each in PIPELINE].index("find_saved_tensors") + 1
    monkeypatch.setattr(Session, "passes", (*PIPELINE[:at], Pass("count_saved", count_saved), *PIPELINE[at:]))
    model = gact_fx.compile(Mixed(), inner="eager", min_elements=64, sample_batches=[mixed_batch()])
    model(*mixed_batch()).backward()
    assert seen == [(True, False)] * 2  # for profiling, and by the plan
    (graph,) = gact_fx.inspect(model).graphs
    names = [stage.name for stage in graph.stages]
    assert names[names.index("find_saved_tensors") + 1] == "count_saved"
    assert names.index("count_saved") < names.index("decide_eligibility")


def test_stages_print_the_pipeline_as_it_ran() -> None:
    model = gact_fx.compile(Mixed(), inner="eager", min_elements=64, sample_batches=[mixed_batch()])
    model(*mixed_batch()).backward()
    text = str(gact_fx.inspect(model).stages)
    lines = text.splitlines()
    places = [next(i for i, line in enumerate(lines) if f" {name} " in line) for name in ("partition", "read_values")]
    assert places == sorted(places) and "choose_products" not in text
    assert lines[0].split() == ["graph", "pass", "edits", "ms"] and float(lines[places[0]].split()[-1]) > 0


def dead_code(pair: GraphPair, context: Context) -> None:
    graph = pair.backward.graph
    with graph.inserting_before(graph.output_node()):
        graph.call_function(torch.ops.aten.neg.default, (graph.find_nodes(op="placeholder")[0],))


def test_dead_code_goes_and_the_graph_is_recompiled(trace: Trace) -> None:
    pair = trace(lambda x: x.tanh().sum(), torch.randn(64, 8, requires_grad=True))
    code = pair.backward.code
    done = run_passes([Pass("dead_code", dead_code, edits=("backward",))], Context(Config(), pair=pair))
    assert pair.backward.code == code
    assert not pair.backward.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
    assert [stage.name for stage in done.stages] == ["dead_code"]


def test_what_a_pass_breaks_is_found_behind_it(trace: Trace) -> None:
    pair = trace(Mixed(), *mixed_batch())
    analysis = analyze(pair)
    insert(pair, analysis, GraphPlan("", tuple(TensorPlan(t.key, Code(8)) for t, _ in analysis.quantized())))

    def break_code(pair: GraphPair, context: Context) -> None:
        loads = pair.backward.graph.find_nodes(op="call_function", target=torch.ops.gact_fx.decompress.default)
        node = next(node for node in loads if node.args[2].is_floating_point)
        node.update_arg(5, 12345)

    context = Context(Config(), pair=pair, saved=analysis.saved)
    run_passes([Pass("break_code", break_code, edits=("backward",), unfinished=True)], context)
    with pytest.raises(GraphVerificationError, match="what was written as"):
        run_passes([Pass("nothing", lambda pair, context: None, edits=("backward",))], context)


def test_seconds_count_the_pass_and_text_is_kept_where_it_edits(trace: Trace) -> None:
    pair = trace(lambda x: x.tanh().sum(), torch.randn(64, 8, requires_grad=True))

    def slow(pair: GraphPair, context: Context) -> None:
        time.sleep(0.05)

    def rename(pair: GraphPair, context: Context) -> None:
        graph = pair.forward.graph
        node = next(node for node in graph.nodes if node.op == "call_function")
        with graph.inserting_after(node):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta.update(node.meta)
        node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)

    steps = [Pass("slow", slow), Pass("rename", rename, edits=("forward",))]
    first, second = run_passes(steps, Context(Config(), pair=pair, keeps_text=True)).stages
    assert first.seconds >= 0.05 and first.before is first.after is None
    assert second.before and second.after and "aten.clone" not in second.before[0] and "aten.clone" in second.after[0]


def test_no_pass_does_what_the_runner_does() -> None:
    for each in PIPELINE:
        source = inspect.getsource(sys.modules[f"gact_fx.passes.{each.name}"])
        for done in (".lint(", "eliminate_dead_code(", ".recompile(", "verify_graphs(", "perf_counter"):
            assert done not in source, (each.name, done)


def test_every_pass_is_in_a_file_of_its_name() -> None:
    for each in PIPELINE:
        assert each.function.__module__ == f"gact_fx.passes.{each.name}" and each.function.__name__ == each.name
    assert len({each.name for each in PIPELINE}) == len(PIPELINE)


@pytest.mark.parametrize(("budget", "cuts"), [(None, 2), ("20 kB", 3)])
def test_a_trial_cut_leaves_the_joint_graph_alone(budget: str | None, cuts: int) -> None:
    """With recompute="full" products are chosen by what a cut without them saves, and tried until no peak is higher."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.square().sum()

    codes: list[str] = []

    def note(joint: Any, context: Context) -> None:
        codes.append(joint.joint.print_readable(print_output=False))

    around = []
    for each in PIPELINE:
        around += [Pass("note", note), each, Pass("note", note)] if each.name == "choose_products" else [each]
    model = Deep()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "passes", tuple(around))
        gact_fx.compile(model, inner="eager", min_elements=64, recompute="full", budget_bytes=budget)
        model(torch.randn(64, 64)).backward()
    # Before the pass, on the copies that are cut without products, with them, and with fewer, and behind the pass.
    assert len(codes) == cuts + 2 and codes[0] == codes[-1]
