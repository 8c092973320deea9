import pytest
import torch
from conftest import Trace, analyze, gradients, relative_error
from torch import nn
from torch.nn import functional as F

import gact_fx
from gact_fx.aot import GraphPair

INNER = pytest.mark.parametrize("inner", ["inductor", "eager"])


def stored_as(pair: GraphPair) -> set[tuple[str, str]]:
    """Operator that made a saved tensor → operator whose result is stored in its place."""
    targets = {node.name: str(node.target) for node in pair.backward.graph.nodes}
    analysis = analyze(pair)
    pairs = zip(analysis.saved, analysis.eligibility, strict=True)
    return {(t.op, targets[how.instead]) for t, how in pairs if how.instead}


def test_the_derivative_of_gelu_is_stored(trace: Trace) -> None:
    """Backward is g * gelu'(x): linear in gelu'(x), bent in x."""
    v = nn.Parameter(torch.randn(16, 64))
    assert stored_as(trace(lambda x: F.gelu(x @ v).sum(), torch.randn(64, 16), inner="inductor")) == {
        ("aten.mm", "aten.add.Tensor")
    }


def test_attention_scores_are_stored_as_probabilities(trace: Trace) -> None:
    w = nn.Parameter(torch.randn(32, 32))

    def attention(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x @ w, x, x, dropout_p=0.1).square().sum()

    found = stored_as(trace(attention, torch.randn(4, 2, 64, 32), inner="inductor"))
    assert found & {("aten.bmm", "aten.where.self"), ("aten.bmm", "aten.div.Tensor")}


def test_a_view_is_no_substitute(trace: Trace) -> None:
    v = nn.Parameter(torch.randn(16, 64))
    assert not stored_as(trace(lambda x: (x @ v).view(2, 32, 64).relu().sum(), torch.randn(64, 16)))


def test_what_is_unbounded_and_read_otherwise_is_refused(trace: Trace) -> None:
    v, w = nn.Parameter(torch.randn(16, 64)), nn.Parameter(torch.randn(64, 8))

    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(y, w)  # type: ignore[attr-defined]
            return y.exp() + (y @ w).sum()

        @staticmethod
        def backward(ctx: object, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            y, w = ctx.saved_tensors  # type: ignore[attr-defined]
            return g * y.exp() + g.sum() * w.sum(1), g.sum() * y.t() @ torch.ones(len(y), 8)

    analysis = analyze(trace(lambda x: Exponential.apply(x @ v, w).sum(), torch.randn(64, 16)))
    (reason,) = [d.reason for t, d in zip(analysis.saved, analysis.eligibility, strict=True) if t.op == "aten.mm"]
    assert reason == "backward is unbounded in it (aten.exp.default)"


@INNER
@pytest.mark.parametrize("scale", [1.0, 20.0, 60.0])
def test_sharp_attention_keeps_its_gradient_bounded(inner: str, scale: float) -> None:
    """exp(Q(x) - max(x)) of 4-bit scores was off by a factor of millions, and infinite at one bit."""
    weight = torch.randn(32, 32) / 6

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight.clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x @ self.weight * scale, x, x, dropout_p=0.1).square().sum()

    x = torch.randn(8, 4, 64, 32)
    model, reference = Attention(), Attention()
    with torch._inductor.config.patch(fallback_random=True):
        for bits, bound in ((8, 0.05), (4, 0.7)):
            torch._dynamo.reset()
            gact_fx.compile(model, budget_bits=bits, adaptive=False, inner=inner, sample_batches=[x])
            torch.manual_seed(1)
            model(x).backward()
            torch.manual_seed(1)
            reference(x).backward()
            assert relative_error(gradients(model), gradients(reference)) < bound


@INNER
def test_cross_entropy_over_confident_logits(inner: str) -> None:
    model, reference = nn.Linear(16, 512), nn.Linear(16, 512)
    reference.load_state_dict(model.state_dict())
    batch = torch.randn(64, 16) * 40, torch.randint(0, 512, (64,))

    def loss_fn(m: nn.Module, b: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(m(b[0]), b[1])

    loss = gact_fx.compile(lambda m, b: loss_fn(m, b), budget_bits=4, adaptive=False, inner=inner)
    for _ in range(2):
        loss(model, batch).backward()
        loss_fn(reference, batch).backward()
        found, exact = gradients(model), gradients(reference)
    if inner == "inductor":  # eager's nll_loss_backward reads the saved values' shape, so that they stay as they are
        assert gact_fx.inspect(loss).ratio > 2
    assert relative_error(found, exact) < 0.1
