"""Forward saves the sums of a residual stream, where backward reads nothing else of what it adds up."""

from collections.abc import Callable

import pytest
import torch
from conftest import Trace, run_pass
from torch import nn

import gact_fx
from gact_fx.graphs.aot import GraphPair

WEIGHTS = [nn.Parameter(torch.randn(64, 64) / 8) for _ in range(3)]
X = torch.randn(32, 64)


def stream(x: torch.Tensor) -> torch.Tensor:
    for weight in WEIGHTS:
        x = x + x.sin() @ weight
    return x.sin()


def saved(pair: GraphPair) -> list[str]:
    """The operators that made the saved tensors."""
    return [str(value.source.target) for value in pair.saved_values() if value.source.op == "call_function"]


def gradients(pair: GraphPair) -> list[torch.Tensor]:
    weights = iter(WEIGHTS)
    placeholders = pair.forward.graph.find_nodes(op="placeholder")
    inputs = [X if tuple(node.meta["val"].shape) == X.shape else next(weights).detach() for node in placeholders]
    outputs = pair.forward(*inputs)
    tangents = [torch.ones_like(x) for x in outputs[: pair.num_user_outputs]]
    return [g for g in pair.backward(*outputs[pair.num_user_outputs :], *tangents) if g is not None]


def test_sums_of_a_stream_are_saved_in_the_place_of_what_they_add(trace: Trace) -> None:
    pair = trace(stream, X, recompute="auto")
    before, exact = saved(pair), gradients(pair)
    run_pass("move_cuts", pair)
    assert before == ["aten.mm.default"] * 3 and saved(pair) == ["aten.add.Tensor"] * 3
    for found, expected in zip(gradients(pair), exact, strict=True):
        assert torch.equal(found, expected)


STAY: dict[str, Callable[[torch.Tensor], object]] = {
    "read otherwise": lambda x: (lambda y: (y + X).tanh() * y.sin())(x @ WEIGHTS[0]),
    "bent before": lambda x: (lambda y: (y.sin() + X).tanh())(x @ WEIGHTS[0]),
    "returned": lambda x: (lambda y: (y, (y + X).tanh()))(x @ WEIGHTS[0]),
    "of a sum in float64": lambda x: ((x @ WEIGHTS[0]) + X.double()).sin(),
    "of a small sum in float32": lambda x: ((x[:4] @ WEIGHTS[0]).bfloat16() + X[:4]).sin(),
    "in one memory": lambda x: (lambda y: (y[:, :32] + X[:, :32]).tanh() * y[:, 32:].sin())(x @ WEIGHTS[0]),
}


@pytest.mark.parametrize("name", STAY)
def test_what_stays(trace: Trace, name: str) -> None:
    pair = trace(STAY[name], X, recompute="auto")
    before = saved(pair)
    run_pass("move_cuts", pair)
    assert saved(pair) == before and before


def test_sums_under_autocast_are_saved_although_they_are_wider(trace: Trace) -> None:
    pair = trace(lambda x: ((x @ WEIGHTS[0]).bfloat16() + X).sin(), X, recompute="auto")
    assert saved(pair) == ["aten._to_copy.default"]
    (value,) = [value for value in pair.saved_values() if value.source.op == "call_function"]
    assert run_pass("move_cuts", pair).replaced == {value.name: 2 * X.numel()}
    assert saved(pair) == ["aten.add.Tensor"]


def test_bytes_before_are_those_of_the_narrower_tensor() -> None:
    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
            self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, norm in zip(self.layers, self.norms, strict=True):
                with torch.autocast("cpu", torch.bfloat16):
                    x = x + layer(norm(x))
            return x.sin().sum()

    model = gact_fx.compile(Stream(), inner="eager", min_elements=64, sample_batches=[torch.randn(64, 64)])
    rows = [row for row in gact_fx.inspect(model).rows if row.op == "aten.add.Tensor" and row.encoding == "quantize"]
    assert rows and all(row.dtype == "float32" and row.bytes_before == 2 * row.numel for row in rows), rows
