import pytest
import torch
from conftest import Trace, analyze, gradients, relative_error
from torch import nn
from torch.nn import functional as F

import gact_fx
from gact_fx.graphs.operator_table import FUSED_ATTENTION

BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FORWARD = FUSED_ATTENTION[BACKWARD]

INNER = pytest.mark.parametrize("inner", ["inductor", "eager"])


class Attention(nn.Module):
    """Self-attention through PyTorch's fused operator; ``scale`` sharpens it."""

    def __init__(self, scale: float, is_causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.scale, self.is_causal = scale, is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q * self.scale, k, v, is_causal=self.is_causal)
        return self.out(y.transpose(1, 2).flatten(2)).square().sum()


@pytest.mark.parametrize("recompute", ["auto", "off"])
def test_backward_computes_attention_again(trace: Trace, recompute: str) -> None:
    pair = trace(Attention(1.0), torch.randn(4, 64, 32), recompute=recompute)
    analysis = analyze(pair)
    graph = pair.backward.graph
    (node,) = graph.find_nodes(op="call_function", target=BACKWARD)
    (again,) = graph.find_nodes(op="call_function", target=FORWARD)
    assert {part.args for part in (node.args[4], node.args[5])} == {(again, 0), (again, 1)}
    kinds = {t.op: d.label for t, d in zip(analysis.saved, analysis.encodings, strict=True)}
    assert kinds["aten._scaled_dot_product_flash_attention_for_cpu[1]"] == "drop"
    if recompute == "auto":
        # The layer behind attention reads the output, too, for the gradient of its weight.
        assert any(user is not node for user in node.args[4].users)
        assert kinds["aten._scaled_dot_product_flash_attention_for_cpu[0]"] == "drop"
    assert not any("not linear" in decision.reason for decision in analysis.encodings)


@INNER
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("scale", "bound"), [(1.0, 0.02), (30.0, 0.1)])
def test_gradients_stay_close_however_sharp(inner: str, is_causal: bool, scale: float, bound: float) -> None:
    model, reference, x = Attention(scale, is_causal), Attention(scale, is_causal), torch.randn(4, 64, 32)
    gact_fx.compile(model, budget_bits=8, adaptive=False, inner=inner, sample_batches=[x])
    model(x).backward(), reference(x).backward()
    assert relative_error(gradients(model), gradients(reference)) < bound
    assert gact_fx.inspect(model).ratio > 3


class Residual(nn.Module):
    """Attention, and a layer whose result is computed again from what attention gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.last = Attention(1.0), nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.attention
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in a.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.last(self.norm(x + a.out(y)).tanh()).square().sum()


@pytest.mark.parametrize("recompute", ["auto", "full"])
def test_a_layer_behind_attention_reads_what_is_computed_again(recompute: str) -> None:
    model, reference, x = Residual(), Residual(), torch.randn(4, 64, 32)
    gact_fx.compile(model, budget_bits=8, inner="eager", recompute=recompute, min_elements=64, sample_batches=[x])
    model(x).backward(), reference(x).backward()
    assert relative_error(gradients(model), gradients(reference)) < 0.02


class Pixels(nn.Module):
    """Attention over pixels, between convolutions, for which Inductor lays tensors out channels last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 8, 3, padding=1)
        self.attention = Attention(5.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image, a = self.first(x), self.attention
        parts = a.qkv(image.flatten(2).transpose(1, 2)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in parts)
        y = a.out(F.scaled_dot_product_attention(5 * q, k, v).transpose(1, 2).flatten(2))
        return self.last(image + y.transpose(1, 2).unflatten(2, image.shape[2:])).square().sum()


@INNER
def test_heads_are_never_laid_out_channels_last(inner: str) -> None:
    """Fused attention would read wrong numbers, without a word."""
    model, reference, x = Pixels(), Pixels(), torch.randn(4, 3, 8, 8)
    gact_fx.compile(model, budget_bits=8, adaptive=False, inner=inner, min_elements=64)
    for _ in range(2):
        for network in (model, reference):
            network.zero_grad()
            network(x).backward()
        assert relative_error(gradients(model), gradients(reference)) < 0.02
