"""Operators of the user's own: autograd functions, and operators registered through torch.library."""

from typing import Any

import pytest
import torch
from test_operators import Between, errors
from torch import fx
from torch.autograd.function import once_differentiable

import gact_fx
from gact_fx.passes.find_masks import is_known


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


# Each with a backward pass of one operator, into which gact_fx cannot look.
@torch.library.custom_op("gact_fx_tests::gate", mutates_args=())
def gate(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0.1, x, 0.0)


@torch.library.custom_op("gact_fx_tests::gate_backward", mutates_args=())
def gate_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0.1, gradient, 0.0)


@torch.library.custom_op("gact_fx_tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


@torch.library.custom_op("gact_fx_tests::cube_backward", mutates_args=())
def cube_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return gradient * 3 * x**2


def register(forward: Any, backward: Any) -> None:
    forward.register_fake(torch.empty_like)
    backward.register_fake(lambda gradient, x: torch.empty_like(x))
    forward.register_autograd(
        lambda ctx, gradient: backward(gradient, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )


register(gate, gate_backward)
register(cube, cube_backward)


@pytest.mark.parametrize("function", [lambda h: Scaled.apply(h, 1.5), Clipped.apply], ids=["scaled", "clipped"])  # type: ignore[no-untyped-call]
def test_autograd_functions(function: Any) -> None:
    model = Between(function)
    assert all(error < 0.02 for error in errors(model, recompute="off"))
    assert any(row.encoding == "quantize" for row in gact_fx.inspect(model).rows)


@pytest.mark.parametrize("recompute", ["auto", "full"])
@pytest.mark.parametrize("operator", [gate, cube], ids=["gate", "cube"])
def test_what_an_unknown_operator_reads_stays_exact(operator: Any, recompute: str) -> None:
    """From codes, a hidden decision would flip for some elements."""
    model = Between(lambda h: operator(h * 2))
    assert all(error < 0.02 for error in errors(model, recompute=recompute))
    name = f"{operator._qualname.replace('::', '.')}_backward"
    assert any(f"{name}.default reads it" in row.reason for row in gact_fx.inspect(model).rows)


def test_operators_that_the_user_vouches_for_are_compressed() -> None:
    model = Between(lambda h: cube(h * 2))
    assert all(error < 0.02 for error in errors(model, unknown_operators="compress"))
    assert not any("reads it" in row.reason for row in gact_fx.inspect(model).rows)
    assert gact_fx.inspect(model).ratio > 3
    with pytest.raises(ValueError, match="unknown_operators must be one of"):
        gact_fx.Config(unknown_operators="smooth")


@pytest.mark.parametrize("name", ["grouped_mm_fallback", "grouped_mm_fallback_backward"])
def test_grouped_matrix_products_of_transformers_are_known(name: str) -> None:
    """Experts of mixtures run by these where PyTorch's own grouped product does not serve."""
    pytest.importorskip("transformers.integrations.moe")
    graph = fx.Graph()
    node = graph.call_function(getattr(torch.ops.transformers, name).default)
    assert is_known(node)
