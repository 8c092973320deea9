"""Codes in host memory between forward and backward. On the CPU the pass is forced."""

import copy
import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Mixed, Trace, analyze, gradients, insert, mixed_batch, run_pass
from torch import fx, nn

import gact_fx
from gact_fx import Config
from gact_fx.codec.code import Code
from gact_fx.graphs.aot import GraphPair
from gact_fx.passes import PIPELINE
from gact_fx.passes.pipeline import Context
from gact_fx.passes.swap_codes import PREFETCH, swap_codes
from gact_fx.passes.verify_graphs import GraphVerificationError, verify_graphs
from gact_fx.plan import GraphPlan, TensorPlan
from gact_fx.training.session import Session

compress, decompress = torch.ops.gact_fx.compress.default, torch.ops.gact_fx.decompress.default
to_host, fetch, arrive = (getattr(torch.ops.gact_fx, name).default for name in ("to_host", "fetch", "arrive"))


def swapped(pair: GraphPair, *devices: str) -> frozenset[str]:
    found = swap_codes(pair, Context(Config()), devices or ("cuda",))
    pair.forward.recompile()
    pair.backward.recompile()
    return found


def forced(pair: GraphPair) -> frozenset[str]:
    return swapped(pair, "cpu")


# The pipeline, swapping what is on the CPU.
FORCED = tuple(
    replace(each, function=functools.partial(swap_codes, devices=("cpu",))) if each.name == "swap_codes" else each
    for each in PIPELINE
)


def calls(module: fx.GraphModule, target: Callable[..., Any]) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="call_function", target=target))


def compressed(trace: Trace, model: nn.Module, *inputs: torch.Tensor) -> tuple[GraphPair, tuple[str, ...]]:
    pair = trace(model, *inputs)
    analysis = analyze(pair)
    tensors = tuple(TensorPlan(t.key, Code(8, seed=1)) for t, _ in analysis.quantized())
    insert(pair, analysis, GraphPlan("", tensors))
    run_pass("defer_recomputation", pair)
    return pair, tuple(t.name for t in analysis.saved)


def test_blobs_leave_as_soon_as_they_are_made(trace: Trace) -> None:
    pair, slots = compressed(trace, Mixed(), *mixed_batch())
    blobs = {v.name: v.source for v in pair.saved_values() if v.source.target is compress}
    moved = forced(pair)
    verify_graphs(pair, slots)
    assert moved == set(blobs) and len(moved) > PREFETCH + 2
    for value in pair.saved_values():
        if value.name in moved:
            assert value.source.target is to_host
            assert value.source.args == (blobs[value.name],) and blobs[value.name].next is value.source
            assert list(blobs[value.name].users) == [value.source]


def test_they_are_asked_for_ahead_and_waited_for_right_before_their_use(trace: Trace) -> None:
    pair, slots = compressed(trace, Mixed(), *mixed_batch())
    before = [node.name for node in calls(pair.backward, decompress)]
    forced(pair)
    verify_graphs(pair, slots)
    nodes = list(pair.backward.graph.nodes)
    assert [node.name for node in calls(pair.backward, decompress)] == before
    waits = calls(pair.backward, arrive)
    assert [wait.args[0] for wait in waits] == calls(pair.backward, fetch)
    for index, wait in enumerate(waits):
        # A blob's values and masks may be read apart: its first use counts.
        assert wait.next.target is decompress and wait.next.args[0] is wait.args[0]
        asked = wait.args[0]
        if index < PREFETCH:
            head = [node.target for node in nodes if node.op != "placeholder"][:PREFETCH]
            assert asked.target is fetch and head == [fetch] * PREFETCH and nodes.index(asked) < nodes.index(waits[0])  # type: ignore[union-attr]
        else:
            assert asked.next is waits[index - PREFETCH]  # type: ignore[union-attr]


def test_nothing_moves_on_other_devices(trace: Trace) -> None:
    pair, _ = compressed(trace, Mixed(), *mixed_batch())
    text = pair.forward.code, pair.backward.code
    assert swapped(pair) == frozenset()
    assert (pair.forward.code, pair.backward.code) == text


def test_only_blobs_on_the_gpu_move_and_return_to_it(trace: Trace) -> None:
    """Traced on the CPU; what one blob is said to be lies on a GPU."""
    pair, slots = compressed(trace, Mixed(), *mixed_batch())
    chosen = next(v for v in pair.saved_values() if v.source.target is compress and v.placeholder.users)
    blob = chosen.source.meta["val"]
    with blob.fake_mode:
        chosen.source.meta["val"] = torch.empty(blob.shape, dtype=blob.dtype, device="cuda:0")
    assert swapped(pair) == {chosen.name}
    verify_graphs(pair, slots)
    (sent,), (asked,) = calls(pair.forward, to_host), calls(pair.backward, fetch)
    assert sent.meta["val"].device.type == "cpu" and chosen.placeholder.meta["val"].device.type == "cpu"
    assert asked.args == (chosen.placeholder, torch.device("cuda:0")) and asked.meta["val"].device.type == "cuda"


@pytest.mark.parametrize("damage", ["late", "host", "values"])
def test_verification_notices(trace: Trace, damage: str) -> None:
    pair, slots = compressed(trace, Mixed(), *mixed_batch())
    forced(pair)
    wait = calls(pair.backward, arrive)[0]
    (blob,), reading = wait.all_input_nodes, wait.next
    if damage == "late":
        reading.append(wait)
        message = f"{blob.name} is read before it has arrived"
    elif damage == "host":
        reading.replace_input_with(blob, blob.args[0])  # type: ignore[arg-type]
        message = "is read in host memory"
    else:
        with pair.backward.graph.inserting_after(wait):
            pair.backward.graph.call_function(torch.ops.aten.neg.default, (blob,))
        message = "read it as values"
    with pytest.raises(GraphVerificationError, match=message):
        verify_graphs(pair, slots)


def step(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model(*batch).backward()
    return gradients(model)


def trained(model: nn.Module, batch: tuple[torch.Tensor, ...], **options: Any) -> list[torch.Tensor]:
    """The gradients of the second step, which runs the plan."""
    model = gact_fx.compile(model, min_elements=64, **options)
    for _ in range(2):
        found = step(model, batch)
    return found


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_gradients_are_the_same(monkeypatch: pytest.MonkeyPatch, inner: str) -> None:
    model, batch = Mixed(dropout=0.1), mixed_batch()
    expected = trained(copy.deepcopy(model), batch, inner=inner)
    monkeypatch.setattr(Session, "passes", FORCED)
    swapped = copy.deepcopy(model)
    found = trained(swapped, batch, inner=inner, swap=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    report = gact_fx.inspect(swapped)
    moved = [row for row in report.rows if row.reason.endswith("moved to host memory")]
    assert moved and all(row.bits is not None or row.encoding == "alias" for row in moved)
    assert any(stage.name == "swap_codes" and stage.before != stage.after for stage in report.graphs[0].stages)


def test_backward_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "passes", FORCED)
    model, batch = Mixed(), mixed_batch()
    trained(model, batch, inner="eager", swap=True)
    loss = model(*batch)
    loss.backward(retain_graph=True)
    first = gradients(model)
    loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), first, strict=True))


def test_on_the_cpu_it_does_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = Mixed(), mixed_batch()
    expected = trained(copy.deepcopy(model), batch, inner="eager")
    with caplog.at_level(logging.WARNING, "gact_fx"):
        found = trained(copy.deepcopy(model), batch, inner="eager", config=Config.from_level("L3"))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len([r for r in caplog.records if "swap=True does nothing here" in r.message]) == 1


def test_the_backend_by_name_says_so_too(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = Mixed(), mixed_batch()
    options: dict[str, str | int | bool | Callable[..., Any]] = {"swap": True, "inner": "eager", "min_elements": 64}
    compiled: Callable[..., torch.Tensor] = torch.compile(model, backend="gact", options=options)
    with caplog.at_level(logging.WARNING, "gact_fx"):
        for _ in range(2):
            compiled(*batch).backward()
    assert len([r for r in caplog.records if "swap=True does nothing here" in r.message]) == 1


def test_operators() -> None:
    x = torch.arange(100, dtype=torch.uint8)
    torch.library.opcheck(to_host, (x,))
    torch.library.opcheck(fetch, (x, torch.device("cpu")))
    torch.library.opcheck(arrive, (x,))
    for copied in (to_host(x), fetch(x, torch.device("cpu"))):
        assert torch.equal(copied, x) and copied.data_ptr() != x.data_ptr()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_on_a_gpu(inner: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8))).cuda()
    x = torch.randn(4096, 512, generator=torch.Generator().manual_seed(0)).cuda()
    plan, found, held = None, [], []
    for swap in (False, True):
        config = Config.from_level("L3", swap=swap, inner=inner)
        compiled = gact_fx.compile(copy.deepcopy(model), config=config, plan=plan)
        for _ in range(3):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            loss = compiled(x).square().mean()
            torch.cuda.synchronize()
            after = torch.cuda.memory_allocated()
            loss.backward()
            gradient = gradients(compiled)
        found.append(gradient)
        held.append(after - before)
        report = gact_fx.inspect(compiled)
        plan = report.plan
        rows = [row for row in report.rows if row.graph is not None and row.bits is not None]
        assert rows and all(row.reason.endswith("moved to host memory") is swap for row in rows)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert held[0] - held[1] > 0.9 * sum(row.bytes_after for row in rows) > 0
