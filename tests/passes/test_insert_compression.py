from typing import Any

import pytest
import torch
from conftest import Mixed, Trace, analyze, insert, masks_of, mixed_batch, relative_error
from torch import fx, nn

from gact_fx.codec.code import Code
from gact_fx.graphs.aot import GraphPair
from gact_fx.passes.encodings import Alias
from gact_fx.passes.graph_analysis import GraphAnalysis
from gact_fx.passes.verify_graphs import GraphVerificationError, verify_graphs
from gact_fx.plan import GraphPlan, TensorPlan

compress = torch.ops.gact_fx.compress.default
decompress = torch.ops.gact_fx.decompress.default


def uniform(analysis: GraphAnalysis, bits: int | None = 8) -> GraphPlan:
    return GraphPlan(
        "", tuple(TensorPlan(t.key, None if bits is None else Code(bits)) for t, _ in analysis.quantized())
    )


def run(pair: GraphPair, inputs: list[Any]) -> list[Any]:
    outputs = fx.Interpreter(pair.forward).run(*inputs)
    users, saved = outputs[: pair.num_user_outputs], outputs[pair.num_user_outputs :]
    tangents = [torch.ones_like(users[-1])]
    return list(fx.Interpreter(pair.backward).run(*saved, *tangents))


def rewritten(
    trace: Trace, function: Any, *inputs: torch.Tensor, bits: int | None = 8
) -> tuple[GraphPair, GraphAnalysis]:
    pair = trace(function, *inputs)
    analysis = analyze(pair)
    insert(pair, analysis, uniform(analysis, bits))
    verify_graphs(pair, tuple(t.name for t in analysis.saved))
    return pair, analysis


def arguments(pair: GraphPair, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors``, told apart by their shapes, in the order of forward's inputs."""
    slots = pair.forward.graph.find_nodes(op="placeholder")
    return [next(t for t in tensors if t.shape == slot.meta["val"].shape).detach() for slot in slots]


def test_blobs_replace_tensors_in_place(trace: Trace) -> None:
    before = trace(Mixed(), *mixed_batch())
    names = [value.name for value in before.saved_values()]
    pair, analysis = rewritten(trace, Mixed(), *mixed_batch())
    values = pair.saved_values()
    assert [value.name for value in values] == names
    for value, decision in zip(values, analysis.encodings, strict=True):
        dtype = value.placeholder.meta["val"].dtype
        assert (dtype is torch.uint8 and value.source.target is compress) == (decision.label != "keep")


def test_gradients_of_the_rewritten_pair(trace: Trace) -> None:
    model, (x, y) = Mixed(), mixed_batch()
    exact = trace(model, x, y)
    placeholders = exact.forward.graph.find_nodes(op="placeholder")
    generator = torch.Generator().manual_seed(3)
    values = []
    for node in placeholders:
        fake = node.meta["val"]
        if fake.dtype.is_floating_point:
            values.append(torch.randn(fake.shape, generator=generator) / 4)
        else:
            values.append(torch.randint(0, 10, fake.shape, generator=generator))
    wanted = run(exact, list(values))
    pair, _ = rewritten(trace, model, x, y)
    found = run(pair, list(values))
    assert [a is None for a in found] == [b is None for b in wanted]
    assert 1e-5 < relative_error([a for a in found if a is not None], [b for b in wanted if b is not None]) < 0.02


def test_decompression_comes_right_before_its_first_use(trace: Trace) -> None:
    pair, _ = rewritten(trace, Mixed(), *mixed_batch())
    nodes = list(pair.backward.graph.nodes)
    views = (torch.ops.aten.permute.default, torch.ops.aten.reshape.default)  # of other blobs, and of statistics
    for node in pair.backward.graph.find_nodes(op="call_function", target=decompress):
        gap = nodes[nodes.index(node) + 1 : nodes.index(min(node.users))]
        assert all(n.target in (decompress, *views) or n.name.endswith("_view") for n in gap)


def test_kept_by_the_plan_stays(trace: Trace) -> None:
    pair, _ = rewritten(trace, lambda x: x.tanh().sum(), torch.randn(64, 8, requires_grad=True), bits=None)
    assert not pair.forward.graph.find_nodes(op="call_function", target=compress)


def test_running_the_pipeline_again_changes_nothing(trace: Trace) -> None:
    pair, _ = rewritten(trace, Mixed(), *mixed_batch())
    text = pair.forward.code, pair.backward.code
    again = analyze(pair)
    assert not any(decision.label != "keep" for decision in again.encodings)
    insert(pair, again, uniform(again))
    assert (pair.forward.code, pair.backward.code) == text


def test_two_views_of_one_buffer_share_a_blob(trace: Trace) -> None:
    v, w = nn.Parameter(torch.randn(16, 32)), nn.Parameter(torch.randn(8, 32))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x @ v).tanh()
        pairs = y.view(2, 32, 32)
        return (pairs @ pairs.transpose(1, 2)).square().sum() + (w @ y.t()).sum()

    x = torch.randn(64, 16) / 4
    pair, analysis = rewritten(trace, function, x)
    (alias,) = [how for how in analysis.encodings if isinstance(how, Alias)]
    sources = {value.name: value.source for value in pair.saved_values()}
    assert sources[alias.name] is sources[alias.of]
    exact = torch.autograd.grad(function(x), [v, w])
    found = {tuple(g.shape): g for g in run(pair, arguments(pair, [x, v, w])) if g is not None}
    assert 1e-5 < relative_error([found[tuple(g.shape)] for g in exact], exact) < 0.02


def test_several_masks_in_one_blob(trace: Trace) -> None:
    v, w = nn.Parameter(torch.randn(16, 32)), nn.Parameter(torch.randn(32, 8))

    def function(x: torch.Tensor) -> torch.Tensor:
        return (nn.functional.hardswish(x @ v) @ w).sum()

    x = torch.randn(64, 16) * 2
    pair, analysis = rewritten(trace, function, x, bits=8)
    assert max(len(masks_of(decision)) for decision in analysis.encodings) >= 2
    exact = torch.autograd.grad(function(x), [v, w])
    found = {tuple(g.shape): g for g in run(pair, arguments(pair, [x, v, w])) if g is not None}
    assert relative_error([found[tuple(g.shape)] for g in exact], exact) < 0.02


@pytest.mark.parametrize("damage", ["target", "order", "count", "dtype", "reader"])
def test_verification_notices(trace: Trace, damage: str) -> None:
    pair, analysis = rewritten(trace, Mixed(), *mixed_batch())
    names = tuple(t.name for t in analysis.saved)
    slots = pair.backward.graph.find_nodes(op="placeholder")
    if damage == "target":
        slots[0].target = "other"
    elif damage == "order":
        names = names[::-1]
    elif damage == "count":
        output = pair.forward.graph.output_node()
        output.meta["desc"] = [*output.meta["desc"], None]
    elif damage == "reader":
        (first, *_) = pair.backward.graph.find_nodes(op="call_function", target=decompress)
        user = next(iter(first.users))
        user.replace_input_with(first, first.args[0])
    else:
        value = next(v for v, d in zip(pair.saved_values(), analysis.encodings, strict=True) if d.label != "keep")
        value.placeholder.meta["val"] = value.placeholder.meta["val"].float()
    with pytest.raises((GraphVerificationError, RuntimeError)):
        verify_graphs(pair, names)


@pytest.mark.parametrize(("position", "wrong"), [(3, 7), (4, 64), (5, 12345), (6, "nearest"), (6, "dither")])
def test_codes_must_be_read_as_they_were_written(trace: Trace, position: int, wrong: object) -> None:
    pair, analysis = rewritten(trace, Mixed(), *mixed_batch())
    node = next(
        n for n in pair.backward.graph.find_nodes(op="call_function", target=decompress) if n.args[2].is_floating_point
    )
    node.update_arg(position, wrong)
    with pytest.raises(GraphVerificationError, match=f"{node.name} reads .* what was written as"):
        verify_graphs(pair, tuple(t.name for t in analysis.saved))
