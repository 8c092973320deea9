"""Operators of the user's own: autograd functions, and operators registered through torch.library."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_operators import Between, X, errors
from torch import fx, nn
from torch.autograd.function import once_differentiable

import gact_fx
from gact_fx.passes.find_masks import is_known
from gact_fx.plan import TensorPlan

INNER = pytest.mark.parametrize("inner", ["inductor", "eager"])


class Scaled(torch.autograd.Function):
    """Saves its input and its result; one argument is no tensor, and one gradient is None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        y = torch.tanh(x * scale)
        ctx.save_for_backward(x, y)
        ctx.scale = scale
        return y * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, y = ctx.saved_tensors
        return gradient * (y + x * ctx.scale * (1 - y * y)), None


class Clipped(torch.autograd.Function):
    """Passes no gradient where its input is large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-0.5, 0.5)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 0.5)


def register(forward: Any, backward: Any) -> None:
    forward.register_fake(torch.empty_like)
    backward.register_fake(lambda gradient, x: torch.empty_like(x))
    forward.register_autograd(
        lambda ctx, gradient: backward(gradient, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )


def mixing(name: str, value: Callable[..., Any], pull_back: Callable[..., Any]) -> Any:
    """An operator with a backward pass of one operator, into which gact_fx cannot look.

    Both also turn their rows round, so that nothing can be said of single elements.
    """

    def forward(x: torch.Tensor) -> torch.Tensor:
        return value(x).flip(-1)

    def backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return pull_back(gradient.flip(-1), x)

    names = f"gact_fx_tests::{name}", f"gact_fx_tests::{name}_backward"
    made = torch.library.custom_op(names[0], forward, mutates_args=())
    register(made, torch.library.custom_op(names[1], backward, mutates_args=()))
    return made


smooth = mixing("smooth", lambda x: x**3, lambda gradient, x: gradient * 3 * x**2)
waving = mixing("waving", torch.sin, lambda gradient, x: gradient * x.cos())
stepped = mixing("stepped", lambda x: x.clamp(min=0.1), lambda gradient, x: gradient * (x > 0.1))
pole = mixing("pole", lambda x: x.abs().log(), lambda gradient, x: gradient / x)
clipped = mixing("clipped", torch.sin, lambda gradient, x: (gradient * x.cos()).clamp(-0.1, 0.1))
noisy = mixing("noisy", torch.sin, lambda gradient, x: gradient * x.cos() * (torch.rand_like(x) < 0.5))


@pytest.mark.parametrize("function", [lambda h: Scaled.apply(h, 1.5), Clipped.apply], ids=["scaled", "clipped"])  # type: ignore[no-untyped-call]
def test_autograd_functions(function: Any) -> None:
    model = Between(function)
    assert all(error < 0.02 for error in errors(model, recompute="off"))
    assert any(row.encoding == "quantize" for row in gact_fx.inspect(model).rows)


@pytest.mark.parametrize("recompute", ["auto", "full"])
@pytest.mark.parametrize("operator", [stepped, smooth], ids=["stepped", "smooth"])
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"adaptive": True, "unknown_operators": "exact"}, " (Config.unknown_operators)"),
        ({"adaptive": False}, ", and adaptive=False does not measure it"),
    ],
    ids=["exact", "uniform"],
)
def test_what_an_unknown_operator_reads_stays_exact(
    options: dict[str, Any], why: str, operator: Any, recompute: str
) -> None:
    """From codes, a hidden decision would flip for some elements."""
    model = Between(lambda h: operator(h * 2))
    assert all(error < 0.02 for error in errors(model, recompute=recompute, **options))
    assert f"{backward_of(operator)} reads it, which gact_fx does not know{why}" in reasons(model)


def backward_of(operator: Any) -> str:
    return f"{operator._qualname.replace('::', '.')}_backward.default"


def reasons(model: nn.Module) -> list[str]:
    return [row.reason for row in gact_fx.inspect(model).rows if row.encoding == "keep"]


@INNER
@pytest.mark.parametrize(
    "function",
    [lambda h: stepped(h * 2), lambda h: smooth(h * 2), lambda h: waving(torch.relu(h))],
    ids=["stepped", "smooth", "behind_relu"],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_what_an_unknown_operator_reads_is_measured(bits: int, function: Any, inner: str) -> None:
    model = Between(function)
    profiled, planned = errors(model, adaptive=True, budget_bits=bits, inner=inner, recompute="off")
    widths = [row.bits for row in gact_fx.inspect(model).rows if row.encoding == "quantize"]
    assert len(widths) >= 3 and not any("gact_fx_tests" in why for why in reasons(model))
    found = gact_fx.measure_gradient_error(model, [X], draws=16)
    assert found.predicted_variance is not None
    error = (found.total.variance + found.total.bias_estimate**2) ** 0.5
    assert 0.5 < error / found.predicted_variance**0.5 < 2
    assert profiled < 0.02 and planned < 2 * error / found.total.norm


@INNER
def test_what_an_unknown_operator_divides_by_stays_exact(inner: str) -> None:
    model = Between(lambda h: pole(h * 2))
    assert all(error < 0.02 for error in errors(model, adaptive=True, inner=inner))
    assert f"{backward_of(pole)} makes more of its codes' errors than the gradient is" in reasons(model)


@INNER
@pytest.mark.parametrize("operator", [clipped, noisy], ids=["clipped", "noisy"])
def test_operators_that_are_not_linear_in_the_gradient(operator: Any, inner: str) -> None:
    """What the one clips is far above the gradients of this loss."""
    model = Between(lambda h: operator(h * 2))
    for _ in errors(model, adaptive=True, inner=inner):
        pass
    assert f"{backward_of(operator)} is not linear in the gradient" in reasons(model)


def test_plans_tell_why_and_what_is_unknown_is_measured_or_exact() -> None:
    entry = TensorPlan("aten.tanh#0", None, reason="because")
    assert TensorPlan.from_data(entry.to_data()) == entry
    with pytest.raises(ValueError, match="unknown_operators must be one of"):
        gact_fx.Config(unknown_operators="smooth")


@pytest.mark.parametrize("name", ["grouped_mm_fallback", "grouped_mm_fallback_backward"])
def test_grouped_matrix_products_of_transformers_are_known(name: str) -> None:
    """Experts of mixtures run by these where PyTorch's own grouped product does not serve."""
    pytest.importorskip("transformers.integrations.moe")
    operator = getattr(torch.ops.transformers, name, None)
    if operator is None:
        pytest.skip(f"this transformers has no {name}")
    node = fx.Graph().call_function(operator.default)
    assert is_known(node)
