"""Attention by a GPU's operators, which `gpu_attention` runs on the CPU. The oracle is eager PyTorch with the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import gpu_attention
import pytest
import torch
from conftest import Trace, analyze, gradients, relative_error
from torch import nn
from torch.nn import functional as F

import gact_fx
from gact_fx.graphs.operator_table import FUSED_ATTENTION
from gact_fx.graphs.operators import arguments_of

KINDS = pytest.mark.parametrize("kind", ["flash", "efficient", "masked"])
RATES = pytest.mark.parametrize("rate", [0.0, 0.3])


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with gpu_attention.registered():
        yield


class Layers(nn.Module):
    """Two layers of attention, with a layer of its own between and behind each."""

    def __init__(self, kind: str, rate: float = 0.0, scale: float = 1.0, is_causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.kind, self.rate, self.scale, self.is_causal = kind, rate, scale, is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in qkv(x).chunk(3, dim=-1))
            y = gpu_attention.attend(self.kind, q * self.scale, k, v, self.rate, self.is_causal)
            x = x + F.gelu(out(y.transpose(1, 2).flatten(2)))
        return x.square().mean()


@KINDS
@RATES
def test_backward_computes_the_logsumexp_again(trace: Trace, kind: str, rate: float) -> None:
    pair = trace(Layers(kind, rate), torch.randn(4, 50, 32))
    analysis = analyze(pair)
    again = [node for node in pair.backward.graph.nodes if node.target in FUSED_ATTENTION.values()]
    assert [arguments_of(node.target, node.args, node.kwargs)["dropout_p"] for node in again] == [0.0, 0.0]
    kinds = {t.op: d.label for t, d in zip(analysis.saved, analysis.encodings, strict=True) if "attention" in t.op}
    assert {label for op, label in kinds.items() if op.endswith("[1]")} == {"drop"}
    # The mask cannot be drawn again, so neither can the output.
    labels = {label for op, label in kinds.items() if op.endswith("[0]")}
    assert labels <= {"quantize", "alias"} if rate else labels == {"drop"}
    assert not any("not linear" in decision.reason for decision in analysis.encodings)


def errors(model: Layers, inner: str) -> list[float]:
    """Of the gradients of three steps at 8 bits, against eager PyTorch that drops the same."""
    reference, x = copy.deepcopy(model), torch.randn(8, 50, 32)
    gact_fx.compile(model, budget_bits=8, inner=inner, min_elements=64)
    found = []
    for step in range(3):
        for each in (model, reference):
            each.zero_grad()
            torch.manual_seed(step)
            each(x).backward()
        found.append(relative_error(gradients(model), gradients(reference)))
    return found


@KINDS
@RATES
@pytest.mark.parametrize(("scale", "is_causal"), [pytest.param(1.0, True, marks=pytest.mark.slow), (8.0, False)])
def test_gradients_stay_close(kind: str, rate: float, scale: float, is_causal: bool) -> None:
    model = Layers(kind, rate, scale, is_causal)
    assert max(errors(model, "eager")) < 0.03
    rows = [row for row in gact_fx.inspect(model).rows if row.encoding == "quantize"]
    assert rows and all(row.sensitivity is not None and row.sensitivity < float("inf") for row in rows)


@pytest.mark.slow
@KINDS
@RATES
def test_gradients_stay_close_under_inductor(kind: str, rate: float) -> None:
    # Inductor draws its own numbers while the first steps are measured.
    assert errors(Layers(kind, rate), "inductor")[-1] < 0.03
