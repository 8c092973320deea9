from collections.abc import Callable
from typing import Any

import pytest
import torch
from activation_bytes import activation_bytes
from conftest import Trace, analyze, gradients, relative_error
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gact_fx
from gact_fx.codec.code import Code
from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.operator_table import NONLINEAR
from gact_fx.plan import TensorPlan

INNER = pytest.mark.parametrize("inner", ["inductor", "eager"])


def coefficients(pair: GraphPair) -> set[tuple[str, str]]:
    """Operator that made a saved tensor → operator whose result may be stored in its place."""
    targets = {node.name: str(node.target) for node in pair.backward.graph.nodes}
    found = [(t, how.coefficients) for t, how in analyze(pair).quantized() if how.coefficients is not None]
    return {(tensor.op, targets[name]) for tensor, of in found for name in of.nodes}


def test_the_derivative_of_gelu_may_be_stored(trace: Trace) -> None:
    """Backward is g * gelu'(x): linear in gelu'(x), bent in x."""
    v = nn.Parameter(torch.randn(16, 64))
    assert coefficients(trace(lambda x: F.gelu(x @ v).sum(), torch.randn(64, 16), inner="inductor")) == {
        ("aten.mm", "aten.add.Tensor")
    }


def test_attention_scores_may_be_stored_as_probabilities(trace: Trace) -> None:
    w = nn.Parameter(torch.randn(32, 32))

    def attention(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x @ w, x, x, dropout_p=0.1).square().sum()

    found = coefficients(trace(attention, torch.randn(4, 2, 64, 32), inner="inductor"))
    assert found & {("aten.bmm", "aten.exp.default"), ("aten.bmm", "aten.div.Tensor")}


def test_a_view_is_no_coefficient(trace: Trace) -> None:
    v = nn.Parameter(torch.randn(16, 64))
    assert not coefficients(trace(lambda x: (x @ v).view(2, 32, 64).relu().sum(), torch.randn(64, 16)))


def test_what_is_exponentiated_and_read_otherwise_is_measured() -> None:
    """Rounded, y in ``g * y.exp()`` would be off by any factor; with ``y @ w`` beside it no one tensor serves both."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x) * 2
            return y.exp().mean() + self.second(y).square().mean()

    model, reference, x = Both(), Both(), torch.randn(64, 16)
    gact_fx.compile(model, budget_bits=8, inner="eager", sample_batches=[x])
    model(x).backward(), reference(x).backward()
    (row,) = [row for row in gact_fx.inspect(model).rows if row.shape == (64, 64)]
    assert row.bytes_after <= row.bytes_before / 3
    assert relative_error(gradients(model), gradients(reference)) < 0.02


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("step", [lambda y: torch.frexp(y).mantissa ** 2, lambda y: (40 * y).sin()])
def test_what_lies_in_the_same_memory_may_bend(step: Callable[[torch.Tensor], torch.Tensor], adaptive: bool) -> None:
    """One blob serves ``y`` and its detached view; codes of 8 bits were 9 to 13 % off, and nothing said so."""

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.left, self.right = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.left(x)
            return (step(y.detach()) * self.right(x)).mean() + y.sin().square().mean()

    model, reference, x = Detached(), Detached(), torch.randn(64, 32)
    options: dict[str, Any] = {"inner": "eager", "min_elements": 64, "recompute": "off", "adaptive": adaptive}
    gact_fx.compile(model, budget_bits=8, sample_batches=[x], **options)
    model(x).backward(), reference(x).backward()
    exact, plan = gradients(reference), gact_fx.inspect(model).plan
    assert plan is not None and plan.variance is not None
    predicted = plan.variance**0.5 / float(torch.cat([g.flatten() for g in exact]).norm())
    assert 0 < relative_error(gradients(model), exact) < 3 * predicted
    assert adaptive or predicted < 0.01


@pytest.mark.slow
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
        loss(model, batch).backward()  # type: ignore[no-untyped-call]
        loss_fn(reference, batch).backward()
        found, exact = gradients(model), gradients(reference)
    assert gact_fx.inspect(loss).ratio > 2
    assert relative_error(found, exact) < 0.1


@INNER
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_softplus_of_a_part_is_smooth(inner: str, scale: float) -> None:
    """Its derivative is y * exp(x) / (1 + exp(x)); the whole of what Mamba projects was kept exact for it."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.project = nn.Linear(16, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            values, steps = self.project(x).split([48, 16], -1)
            return (values.square() * F.softplus(steps * scale).mean(-1, keepdim=True)).mean()

    model, reference, x = Gated(), Gated(), torch.randn(64, 16)
    gact_fx.compile(model, budget_bits=8, inner=inner, sample_batches=[x])
    model(x).backward(), reference(x).backward()
    assert not [row.reason for row in gact_fx.inspect(model).rows if "not linear" in row.reason]
    assert relative_error(gradients(model), gradients(reference)) < 0.02


@INNER
def test_decay_by_softplus_is_bounded(inner: str) -> None:
    """A state space's ``exp(-exp(a) softplus(x))``; Inductor computes softplus again in backward, by log1p."""

    class Decay(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.steps, self.values = nn.Linear(32, 64), nn.Linear(32, 64)
            self.rate = nn.Parameter(torch.zeros(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            steps = F.softplus(self.steps(x))
            return (torch.exp(steps * -self.rate.exp()) * self.values(x) * steps).square().mean()

    model, reference, x = Decay(), Decay(), torch.randn(64, 32)
    gact_fx.compile(model, budget_bits=8, inner=inner, sample_batches=[x])
    model(x).backward(), reference(x).backward()
    assert not [row.reason for row in gact_fx.inspect(model).rows if "not linear" in row.reason]
    assert relative_error(gradients(model), gradients(reference)) < 0.02


class Masked(nn.Module):
    """Attention with an additive mask: of what is padded and what is later, or of what belongs to other segments."""

    def __init__(self, kind: str, is_fused: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 1)
        self.kind, self.is_fused = kind, is_fused

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        mask = self.mask(other)
        if self.is_fused:
            return self.attend(x, mask).square().mean()
        # What a checkpointed region reads is all that is saved of it.
        return checkpoint(self.attend, x, mask, use_reentrant=False).square().mean()

    def mask(self, other: torch.Tensor) -> torch.Tensor:
        if self.kind == "segments":
            return ((1 - other @ other.transpose(1, 2)) * -1e9)[:, None]
        lowest = torch.finfo(other.dtype).min
        padded, later = (1 - other)[:, None, None, :] * lowest, torch.full((32, 32), lowest).triu(1)
        return torch.minimum(padded + 0 * later, later + 0 * padded)

    def attend(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.is_fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            # In a spelling that Inductor does not take for fused attention.
            y = torch.exp(torch.log_softmax((q / 4) @ k.transpose(-1, -2) + mask, -1)) @ v
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.slow
@INNER
@pytest.mark.parametrize("recompute", ["auto", "off"])
@pytest.mark.parametrize("kind", ["padded", "segments"])
@pytest.mark.parametrize("is_fused", [True, False])
def test_an_additive_mask_stays_exact(inner: str, recompute: str, kind: str, is_fused: bool) -> None:
    """Its zeros, decoded from a range that ends at -1e9, were off by a hundred, and exponentiated."""
    model, reference = Masked(kind, is_fused), Masked(kind, is_fused)
    reference.load_state_dict(model.state_dict())
    segments = F.one_hot(torch.randint(0, 4, (8, 32)), 4).float()
    padding = (torch.rand(8, 32) > 0.3).float().index_fill(1, torch.tensor([0]), 1)
    batch = torch.randn(8, 32, 32), segments if kind == "segments" else padding
    gact_fx.compile(
        model, budget_bits=8, adaptive=False, min_elements=64, inner=inner, recompute=recompute, sample_batches=[batch]
    )
    model(*batch).backward(), reference(*batch).backward()
    assert relative_error(gradients(model), gradients(reference)) < 0.01


def test_no_fused_attention_is_linear_in_its_mask() -> None:
    aten = torch.ops.aten
    found = torch._C._dispatch_get_all_op_names()
    for name in {name.removeprefix("aten::") for name in found if name.startswith("aten::_scaled_dot_product_")}:
        is_backward = name.endswith("_backward")
        if not is_backward and f"aten::{name}_backward" not in found:
            continue
        arguments = getattr(aten, name).default._schema.arguments
        positions = {*NONLINEAR.get(getattr(aten, name), ())}
        nonlinear = {argument.name for i, argument in enumerate(arguments) if {i, argument.name} & positions}
        masks = {argument.name for argument in arguments} & {"attn_mask", "attn_bias"}
        assert nonlinear == masks | ({"query", "key"} if is_backward else set()), name


def test_a_softmax_in_float32_of_bfloat16_scores(trace: Trace) -> None:
    """Of another dtype than the scores, the exponentials of these may take their place, and count what they take."""
    v = nn.Parameter(torch.randn(32, 64).bfloat16())
    pair = trace(lambda x: (x @ v).float().softmax(-1).square().sum(), torch.randn(64, 32).bfloat16(), inner="inductor")
    found = [(t, how) for t, how in analyze(pair).quantized() if how.coefficients is not None]
    ((tensor, how),) = found
    assert how.coefficients is not None
    assert (tensor.dtype, how.coefficients.dtype) == (torch.bfloat16, torch.float32)
    groups = tensor.numel // 256
    for stored, itemsize in (("values", 2), ("coefficients", 4)):
        entry = TensorPlan(tensor.key, Code(4), stored=stored)
        assert how.nbytes(tensor, entry) == tensor.numel // 2 + groups * (2 + itemsize), stored


class Attention(nn.Module):
    """Attention with dropout, of which the scores are saved: backward reads them by way of their exponentials alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.out = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.scaled_dot_product_attention(4 * self.project(x), x, x, dropout_p=0.1)
        return self.out(y).square().mean()


def test_statistics_that_nobody_reads_are_not_held() -> None:
    model, reference, x = Attention(), Attention(), torch.randn(4, 2, 64, 32)
    gact_fx.compile(model, budget_bits=8, adaptive=False, min_elements=64, sample_batches=[x])
    with torch._inductor.config.patch(fallback_random=True):
        torch.manual_seed(1)
        loss = model(x)
        held = activation_bytes(loss, exclude=[*model.parameters(), x])
        loss.backward()
        torch.manual_seed(1)
        reference(x).backward()
    report = gact_fx.inspect(model)
    dropped = {
        row.op for row in report.rows if row.reason.startswith("not stored: backward reads what was computed from it")
    }
    assert dropped == {"aten.amax"} and report.bytes_after == held
    assert relative_error(gradients(model), gradients(reference)) < 0.02


class Standardized(nn.Module):
    """One tensor's coefficients are all that backward reads of the statistics by which another is standardised."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.norm = nn.BatchNorm1d(64, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, last = self.layers
        h, y = first(x), second(x)
        c = (F.elu(self.norm(h)) * (8 * y).exp()).detach()
        return (last(third(x) * c + F.gelu(y)) + h.sin()).square().mean()


@INNER
def test_statistics_by_which_another_tensor_is_standardised_are_held(inner: str) -> None:
    model, reference, x = Standardized(), Standardized(), torch.randn(256, 64)
    gact_fx.compile(model, budget_bits=8, inner=inner, min_elements=16, sample_batches=[x])
    model(x).backward(), reference(x).backward()
    assert relative_error(gradients(model), gradients(reference)) < 0.03


class Broken(nn.Module):
    """A graph break before a softmax's maximum is subtracted: what is held is not this graph's to free."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.values, self.out = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = 4 * self.scores(x)
        largest = a.detach().amax(-1, keepdim=True) * 1.0
        torch._dynamo.graph_break()
        return self.out(self.values(x) * (a - largest).exp()).square().mean()


@pytest.mark.slow
def test_statistics_of_earlier_graphs_are_not_said_to_be_freed() -> None:
    model, x = Broken(), torch.randn(256, 32)
    gact_fx.compile(model, budget_bits=8, min_elements=128, sample_batches=[x])
    held = activation_bytes(model(x), exclude=[*model.parameters(), x])
    model(x).backward()
    assert gact_fx.inspect(model).bytes_after == held
