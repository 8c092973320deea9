"""What eager PyTorch saves between compiled graphs, against eager PyTorch without hooks."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from activation_bytes import activation_bytes
from conftest import gradients
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import gact_fx
from gact_fx.breaks.eager_regions import EagerRegions
from gact_fx.codec.packed_tensors import compressed_saved_tensors


class Broken(nn.Module):
    """Compiled, then eager, then compiled again."""

    def __init__(self, eager: Callable[[torch.Tensor], torch.Tensor] | None = None, width: int = 64) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.eager = eager

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(torch.tanh(self.first(x)))).square().mean()

    @torch.compiler.disable
    def between(self, x: torch.Tensor) -> torch.Tensor:
        if self.eager is not None:
            return self.eager(self.middle(x))
        return torch.relu(self.norm(self.middle(x)))


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    return gact_fx.compile(copy.deepcopy(model), inner="eager", min_elements=64, **options)


def train(model: nn.Module, batch: torch.Tensor, steps: int = 3) -> list[torch.Tensor]:
    """Gradients of the last of a few equal steps, when everything has been learned."""
    for _ in range(steps):
        model.zero_grad()
        model(batch).backward()
    return gradients(model)


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return float(sum((a - b).square().sum() for a, b in zip(found, exact, strict=True)) ** 0.5) / float(
        sum(b.square().sum() for b in exact) ** 0.5
    )


def test_eager_regions_are_in_codes_and_their_gradients_right() -> None:
    model, batch = Broken(), torch.randn(128, 64)
    ours = compiled(model, budget_bits=8)
    assert error(train(ours, batch), train(model, batch)) < 0.01
    rows = {row.op: row for row in gact_fx.inspect(ours).rows if row.graph is None}
    assert rows["NativeLayerNormBackward0.input"].encoding == "quantize"
    assert rows["AddmmBackward0.mat1"].bits == 8
    assert rows["ReluBackward0.result"].encoding == "mask"
    assert rows["ReluBackward0.result"].bytes_after == 128 * 64 // 8


@pytest.mark.parametrize("bits", [4, 8])
def test_the_budget_has_room_for_eager_codes(bits: int) -> None:
    """Their width is that of the budget, and their metadata come on top."""
    batch = torch.randn(1024, 64)
    ours = compiled(Broken(), budget_bits=bits, sample_batches=[batch])
    train(ours, batch)
    report = gact_fx.inspect(ours)
    assert {row.graph is None for row in report.rows if row.encoding == "quantize"} == {True, False}
    assert report.average_bits is not None and report.average_bits <= bits


OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "leaky relu": F.leaky_relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "log_softmax": lambda x: F.log_softmax(4 * x, -1),
    "softmax": lambda x: F.softmax(x, -1),
    "square": lambda x: x**2,
    "cube": lambda x: x**3,
    "division": lambda x: x / (x.detach().abs() + 1),
    "product": lambda x: x * torch.sigmoid(x),
    "rms": lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
    "attention": lambda x: F.scaled_dot_product_attention(*3 * [x.view(2, 4, -1, 16)]).flatten().view(-1, 64),  # type: ignore[arg-type]
    "convolution": lambda x: F.conv1d(x.T[None], torch.ones(64, 1, 3) / 3, padding=1, groups=64)[0].T,
    "max pool": lambda x: F.max_pool2d(x[None, None], 3, 1, 1)[0, 0],
    "in place": lambda x: torch.relu_(x.mul(2)),
    "top values": lambda x: x.sort(-1).values * torch.linspace(0, 1, 64),
    "indexing": lambda x: x[torch.arange(len(x)).flip(0)],
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "hard": lambda x: F.hardtanh(x) + F.relu6(x) + F.hardswish(x),
    "elu": F.elu,
    "clamp": lambda x: x.clamp(-0.1, 0.1),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_gradient_through_eager_operator(name: str) -> None:
    """By the hooks alone: what is compiled before and behind is the same for all operators."""
    model, batch = Broken(OPERATORS[name]), torch.randn(128, 64)
    exact = train(model, batch, 1)
    hooked = EagerRegions(8, 0, 64, lambda: list(model.parameters())).around(model)
    for _ in range(3):
        model.zero_grad()
        hooked(batch).backward()
    assert 1e-5 < error(gradients(model), exact) < 0.02


def test_unbiased_through_log_softmax() -> None:
    """Its exponential is what is rounded: coding the logarithm itself is off by a sixth at 2 bits."""
    x, upstream = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)

    def gradient(call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return torch.autograd.grad(call(x * 8), x, upstream)[0]

    exact, found = gradient(lambda x: F.log_softmax(x, -1)), []
    for seed in range(100):
        hooked = EagerRegions(2, seed, 64).around(lambda x: F.log_softmax(x * 1, -1))
        found.append(gradient(hooked))
    noise = torch.stack(found).sub(exact).norm(dim=(1, 2)).mean()
    assert noise > 0
    assert (torch.stack(found).mean(0) - exact).norm() < 0.2 * noise


def test_model_that_falls_back_entirely_keeps_its_ratio() -> None:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(4)]
    model, batch = nn.Sequential(*layers), torch.randn(512, 64)
    ours = copy.deepcopy(model)
    ours.forward = torch.compiler.disable(ours.forward)  # type: ignore[method-assign]
    ours = gact_fx.compile(ours, inner="eager", budget_bits=4)
    for _ in range(2):
        ours(batch).mean().backward()
    held = [activation_bytes(m(batch).mean(), exclude=[*m.parameters(), batch]) for m in (model, ours)]
    assert held[0] / held[1] > 7
    assert sum(row.bytes_after for row in gact_fx.inspect(ours).rows) == pytest.approx(held[1], rel=0.02)


def test_equal_tensors_share_their_codes() -> None:
    """Query, key and value projections save one input; eager PyTorch holds it once, and so do the codes."""
    projections = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    ours = compiled(Broken(lambda x: sum(layer(x) for layer in projections)), budget_bits=4)
    train(ours, torch.randn(128, 64))
    rows = [row for row in gact_fx.inspect(ours).rows if row.graph is None and row.op == "AddmmBackward0.mat1"]
    assert len(rows) == 4 and sum(row.bytes_after > 0 for row in rows) == 2


def test_parameters_and_the_batch_are_left_alone() -> None:
    ours = compiled(Broken(), budget_bits=4)
    batch = torch.randn(128, 64, requires_grad=True)
    train(ours, batch)
    shapes = [row.op for row in gact_fx.inspect(ours).rows if row.graph is None]
    statistics = ["NativeLayerNormBackward0.result1", "NativeLayerNormBackward0.result2"]
    saved = ["AddmmBackward0.mat1", "NativeLayerNormBackward0.input", "ReluBackward0.result"]
    assert sorted(shapes) == sorted(saved + statistics)


def test_unknown_functions_are_kept_exact_and_said() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x)
            return x.abs()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return gradient * ctx.saved_tensors[0].sign()

    model, batch = Broken(Double.apply), torch.randn(128, 64)
    ours = compiled(model, budget_bits=4)
    train(ours, batch)
    (row,) = [row for row in gact_fx.inspect(ours).rows if row.op.startswith("DoubleBackward")]
    assert row.encoding == "keep" and "does not know whether" in row.reason


def test_modified_in_place_after_it_was_saved() -> None:
    """PyTorch does not check the version of a tensor that went through hooks; they do."""
    kept: list[torch.Tensor] = []

    def remember(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 1)
        return kept[-1].abs()

    ours = compiled(Broken(remember), budget_bits=4)
    loss = ours(torch.randn(128, 64))
    kept[-1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_of_the_caller_come_first() -> None:
    model, batch = Broken(), torch.randn(128, 64)
    ours, exact = compiled(model, budget_bits=8), train(model, batch)
    train(ours, batch)
    with torch.autograd.graph.save_on_cpu():
        loss = ours(batch)
    loss.backward()
    assert error(gradients(ours), exact) < 0.01


def test_several_forwards_backward_twice_and_no_grad() -> None:
    model, batch = Broken(), torch.randn(128, 64)
    ours = compiled(model, budget_bits=8)
    exact = [2 * g for g in train(model, batch)]
    train(ours, batch)
    with torch.no_grad():
        ours(batch)
    first, second = ours(batch), ours(batch)
    second.backward()
    first.backward()
    assert error(gradients(ours), exact) < 0.01


def test_control_flow_that_changes_is_told_apart() -> None:
    """One line of a program that calls another operator in turn must not take over the other one's treatment."""
    turn = [0]

    def alternating(x: torch.Tensor) -> torch.Tensor:
        function = (torch.sigmoid, torch.relu)[turn[0] % 2]
        return function(x.square() - 0.2)

    model, batch = Broken(alternating), torch.randn(128, 64)
    ours = compiled(model, budget_bits=8)
    for turn[0] in range(6):
        found = train(ours, batch, 1)
        assert error(found, train(model, batch, 1)) < 0.02


def test_nothing_is_held_after_backward() -> None:
    ours = compiled(Broken(), budget_bits=4)
    batch = torch.randn(128, 64)
    train(ours, batch)

    def live() -> int:
        gc.collect()
        # Seconds faster than isinstance, which torch.Tensor answers itself.
        return sum(type(x) is torch.Tensor for x in gc.get_objects())

    before = live()
    train(ours, batch)
    assert live() <= before


def test_nothing_waits_for_the_collection_of_cycles() -> None:
    ours, batch = compiled(Broken(lambda x: torch.relu(x) + x.exp()), budget_bits=4), torch.randn(128, 64)
    train(ours, batch)
    gc.collect()
    gc.disable()
    try:
        loss = ours(batch)
        result = weakref.ref(loss)
        loss.backward()
        del loss
        assert result() is None
    finally:
        gc.enable()


def test_a_mask_that_is_also_multiplied_as_a_matrix() -> None:
    """As a mask it is one bit and a scale, which the codes of its values are not."""
    weight = nn.Parameter(torch.randn(64, 64) / 8)

    def masked(x: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(x.numel()).view(x.shape) % 3 > 0) * 2.0
        return mask @ weight + x * mask

    model, batch = Broken(masked), torch.randn(128, 64)
    exact = [*train(model, batch, 1), weight.grad]
    ours = compiled(model, budget_bits=8)
    for _ in range(3):
        weight.grad = None
        assert error([*train(ours, batch, 1), weight.grad], exact) < 0.02  # type: ignore[arg-type, list-item]


@pytest.mark.slow
@pytest.mark.parametrize("function", [torch.tan, torch.expm1, lambda x: x.square().add(1).sqrt()])
def test_forward_without_backward_holds_nothing(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Nodes that save their own result, exactly."""
    results: list[StorageWeakRef] = []

    def remember(x: torch.Tensor) -> torch.Tensor:
        y = function(x)
        results.append(StorageWeakRef(y.untyped_storage()))
        return y * 1

    ours, batch = compiled(Broken(remember), budget_bits=4), torch.randn(128, 64)
    train(ours, batch)
    ours(batch)
    gc.collect()
    assert all(result.expired() for result in results)


def test_modified_in_place_before_forward_ended() -> None:
    def modify(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        z = y * 1
        y.add_(1)
        return z

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        compiled(Broken(modify), budget_bits=4)(torch.randn(128, 64)).backward()


def test_bytes_of_what_is_in_codes_and_exact_too() -> None:
    """One tensor, which one node reads as codes and another exactly, is held as both."""

    def ratio(x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(x)
        return x.detach() / y

    ours = compiled(Broken(ratio), budget_bits=4)
    train(ours, torch.randn(128, 64))
    rows = {row.op: row for row in gact_fx.inspect(ours).rows if row.graph is None}
    code, exact = rows["SigmoidBackward0.result"], rows["DivBackward0.other"]
    assert code.encoding == "quantize" and exact.encoding == "keep"
    assert (code.bytes_before, exact.bytes_before, exact.bytes_after) == (128 * 64 * 4, 0, 128 * 64 * 4)


def test_embeddings_are_activations() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm, self.last = nn.Embedding(50, 64), nn.LayerNorm(64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.between(x)).square().mean()

        @torch.compiler.disable
        def between(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(torch.tanh(self.table(x)))

    ours = compiled(Embedded(), budget_bits=4)
    train(ours, torch.randint(50, (16, 32)))
    rows = {row.op: row for row in gact_fx.inspect(ours).rows if row.graph is None}
    assert rows["TanhBackward0.result"].encoding == rows["NativeLayerNormBackward0.input"].encoding == "quantize"


def test_another_operator_at_a_known_place_is_kept_exact(caplog: pytest.LogCaptureFixture) -> None:
    """Where codes are right for what one line used to run, and wrong for what it runs now, that is said and mended."""
    operator = [torch.square]
    model, batch = Broken(lambda x: operator[0](x.sigmoid() + 1e-3)), torch.randn(128, 64)
    ours = compiled(model, budget_bits=8)
    train(ours, batch)
    operator[0] = torch.log
    with caplog.at_level("WARNING", "gact_fx"):
        train(ours, batch, 1)
    assert "ran LogBackward0.self where it used to run PowBackward0.self" in caplog.text
    train(ours, batch, 1)
    (row,) = [row for row in gact_fx.inspect(ours).rows if row.op == "LogBackward0.self"]
    assert row.encoding == "keep"


def test_torch_func_around_a_compiled_model() -> None:
    """It forbids saved-tensor hooks; what runs within is as with torch.compile."""
    model, batch = Broken(torch.relu), torch.randn(128, 64)
    ours = compiled(model, budget_bits=8)
    train(ours, batch)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def gradient(model: nn.Module) -> list[torch.Tensor]:
        return list(torch.func.grad(lambda p: torch.func.functional_call(model, p, (batch,)))(parameters).values())

    assert error(gradient(ours), gradient(model)) < 0.02


def test_torch_func_between_graphs(caplog: pytest.LogCaptureFixture) -> None:
    """``torch.func.grad`` refuses to run beneath saved-tensor hooks, so such a model does without them."""

    def slope(x: torch.Tensor) -> torch.Tensor:
        return x + torch.func.grad(lambda y: y.pow(3).sum())(x)

    model, batch = Broken(slope), torch.randn(128, 64)
    exact, ours = train(model, batch), compiled(model, budget_bits=8)
    with caplog.at_level("WARNING", "gact_fx"):
        for _ in range(3):
            assert error(train(ours, batch, 1), exact) < 0.02
    assert caplog.text.count("torch.func") == 1
    assert gact_fx.inspect(ours).ratio > 2


def test_bytes_of_a_model_that_is_called_twice_in_a_step() -> None:
    model, batch = Broken(), torch.randn(128, 64)
    ours = compiled(model, budget_bits=4)
    totals = []
    for calls in (1, 2, 2, 1):
        for _ in range(2):
            sum(ours(batch) for _ in range(calls)).backward()
        last = gact_fx.inspect(ours).steps[-1]
        totals.append(sum(graph.bytes_after for graph in last.graphs if graph.graph is None))
    assert totals == [totals[0], 2 * totals[0], 2 * totals[0], totals[0]]


def test_what_a_closure_holds_is_no_activation() -> None:
    """A batch that the caller holds frees nothing when it is stored in codes, whichever way it reaches the model."""
    weight, batch = nn.Parameter(torch.randn(64, 64)), torch.randn(128, 64)
    step = gact_fx.compile(lambda: (batch @ weight).tanh().square().sum(), inner="eager", min_elements=64)
    for _ in range(2):
        step().backward()  # type: ignore[no-untyped-call]
    assert all(row.bytes_before == 0 for row in gact_fx.inspect(step).rows if row.op == "input")


def test_what_profiling_stores_does_not_hold_itself() -> None:
    """An operator that saves its own result, too small for codes, is freed with it."""
    with compressed_saved_tensors():
        result = torch.ones(4, requires_grad=True).exp()
    storage = StorageWeakRef(result.untyped_storage())
    del result
    assert storage.expired()


class Energy(nn.Module):
    """A gradient within the model, which Dynamo traces into the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
        self.outer = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.outer(x)
        slope = torch.func.vmap(torch.func.grad(lambda z: self.inner(z).sum()))(x)
        return (slope - x).square().mean() + self.inner(x).square().mean()


@pytest.mark.parametrize("has_samples", [False, True])
def test_a_gradient_within_the_graph_leaves_no_ban_of_hooks(has_samples: bool) -> None:
    model, batch = Energy(), torch.randn(128, 8)
    ours = compiled(model, budget_bits=8, sample_batches=[(batch,)] if has_samples else None)
    assert error(train(ours, batch, 4), train(model, batch)) < 0.02
    report = gact_fx.inspect(ours)
    assert report.bytes_after < report.bytes_before / 3
    with torch.autograd.graph.save_on_cpu():
        model.outer(batch)
