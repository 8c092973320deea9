import copy
from functools import partial

import pytest
import torch
from conftest import Mixed, Trace, analyze, decisions, gradients, mixed_batch, relative_error
from test_custom_operators import backward_of, smooth
from torch import nn

import gact_fx


def reasons(trace: Trace, function: object, *inputs: torch.Tensor, **options: bool) -> dict[str, str]:
    analysis = analyze(trace(function, *inputs, **options))
    return {t.op: d.reason for t, d in zip(analysis.saved, analysis.encodings, strict=True)}


def test_floats_are_quantized_and_masks_are_exact(trace: Trace) -> None:
    w = nn.Parameter(torch.randn(16, 32))
    v = nn.Parameter(torch.randn(32, 8))
    analysis = analyze(trace(lambda x: (nn.functional.dropout((x @ w).tanh(), 0.5) @ v).sum(), torch.randn(8, 16)))
    found = {(t.op, d.label) for t, d in zip(analysis.saved, analysis.encodings, strict=True)}
    assert ("aten.tanh", "quantize") in found
    assert ("aten.native_dropout[1]", "mask") in found


def test_refusals_have_reasons(trace: Trace) -> None:
    weight = nn.Parameter(torch.randn(16, 32))
    norm = nn.LayerNorm(32)

    def function(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        y = norm(x @ weight.exp())
        return y[index].tanh().sum()

    # Marked, what comes from parameters would be computed again and not be saved at all.
    found = reasons(partial(trace, marked=False), function, torch.randn(128, 16), torch.randint(0, 8, (100,)))
    assert found["input"] in ("an input that the caller holds", "a parameter or buffer, held anyway")
    assert found["aten.exp"] == "computed from parameters alone"
    assert found["aten.native_layer_norm[1]"] == "a statistic of rows or channels"


def test_small_tensors_are_kept(trace: Trace) -> None:
    w = nn.Parameter(torch.randn(16, 2))
    analysis = analyze(trace(lambda x: (x @ w).tanh().sum(), torch.randn(8, 16)))
    assert "fewer than 64 elements" in {d.reason for d in analysis.encodings}


def test_float64_is_compressed_and_indices_are_packed(trace: Trace) -> None:
    w = nn.Parameter(torch.randn(16, 32, dtype=torch.float64))
    analysis = analyze(trace(lambda x: (x @ w).tanh().sum(), torch.randn(8, 16, dtype=torch.float64)))
    assert [t.op for t, _ in analysis.quantized()] == ["aten.tanh"]
    taken = reasons(trace, lambda x: (x * w[0, 0].float()).gather(1, (x * 8).long()).sum(), torch.rand(8, 16))
    assert taken["aten._to_copy"] == "integers of a known range, packed exactly"


def test_a_kept_tensor_keeps_what_shares_its_memory(trace: Trace) -> None:
    w = nn.Parameter(torch.randn(4, 64))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x @ w).view(-1)
        return (y * y.view(16, 64).t().reshape(-1)).sum() + y[:8].sin().sum()

    analysis = analyze(trace(function, torch.randn(16, 4)))
    by_storage: dict[int, set[bool]] = {}
    for tensor, decision in zip(analysis.saved, analysis.encodings, strict=True):
        if tensor.owner == "nobody":
            by_storage.setdefault(tensor.storage, set()).add(decision.label != "keep")
    assert by_storage and all(len(kinds) == 1 for kinds in by_storage.values())


def test_memory_order_follows_the_strides(trace: Trace) -> None:
    conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    analysis = analyze(trace(lambda x: conv(x).tanh().sum(), x))
    orders = [how.order for tensor, how in analysis.quantized() if tensor.op == "aten.tanh"]
    assert orders == [(0, 2, 3, 1)]


def test_every_tensor_gets_a_decision(trace: Trace) -> None:
    analysis = analyze(trace(Mixed(), *mixed_batch()))
    assert [t.name for t in analysis.saved] == [d.name for d in analysis.encodings]
    assert all(d.reason for d in decisions(analysis).values() if d.label == "keep")


def test_what_an_unknown_operator_reads_has_a_blob_of_its_own(trace: Trace) -> None:
    """While it is profiled it is exact, and so would be what else reads the blob, whose error nobody would see."""
    v = nn.Parameter(torch.randn(16, 32))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x @ v).tanh()
        pairs = smooth(y).view(2, 32, 32)
        return (pairs @ pairs.transpose(1, 2)).square().sum() + smooth(pairs.view(64, 32)).sum()

    why = "reads it, which gact_fx does not know, and others lie in the same memory"
    found = decisions(analyze(trace(function, torch.randn(64, 16)))).values()
    assert f"{backward_of(smooth)} {why}" in {decision.reason for decision in found}


def test_what_the_model_returns_is_compressed_and_counted() -> None:
    """Its caller seldom holds it until backward; if it does, the codes come on top."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh())
    gact_fx.compile(model, inner="eager", sample_batches=[torch.randn(64, 16)], loss_fn=lambda m, b: m(b).sum())
    model(torch.randn(64, 16)).sum().backward()
    (row,) = [row for row in gact_fx.inspect(model).rows if row.op == "aten.tanh"]
    assert (row.encoding, row.bytes_before) == ("quantize", 64 * 64 * 4)
    # 4 bits an element, metadata included.
    assert row.bytes_after <= 64 * 64 // 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_statistics_stay_exact_whatever_the_sizes(dynamic: bool) -> None:
    """The shape that a mean is viewed in may be a size that varies."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.a(x))
            scale = hidden.mean(1, keepdim=True).reshape(x.shape[0], 64)
            return (self.b(hidden[:, 0]) * scale).square().mean()

    model = gact_fx.compile(Pooled(), inner="eager", min_elements=64, dynamic=dynamic)
    for _ in range(2):
        model(torch.randn(48, 8, 32)).backward()
    reasons = {row.op: row.reason for row in gact_fx.inspect(model).rows}
    assert reasons["aten.mean.dim"] == "a statistic of rows or channels"


def test_pooled_features_are_no_statistic() -> None:
    """What a linear layer reads of a mean is as good in codes as what it reads of anything else."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).mean(1)).square().mean()

    batch, exact = torch.randn(48, 8, 32), Pooled()
    model = gact_fx.compile(copy.deepcopy(exact), inner="eager", min_elements=64, budget_bits=8)
    for _ in range(2):
        model.zero_grad()
        model(batch).backward()
    exact(batch).backward()
    encodings = {row.op: row.encoding for row in gact_fx.inspect(model).rows}
    assert encodings["aten.mean.dim"] == "quantize"
    assert relative_error(gradients(model), gradients(exact)) < 0.01
