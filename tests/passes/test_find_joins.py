"""Which joins of far layers are saved: those whose sources would be decoded together, and are many."""

from collections.abc import Callable

import pytest
import torch
from conftest import Trace
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from gact_fx.graphs.aot import GraphPair
from gact_fx.passes.find_joins import find_joins

X = torch.randn(64, 32)
SQUARES = [nn.Parameter(torch.randn(32, 32) / 6) for _ in range(6)]
Function = Callable[[torch.Tensor], torch.Tensor]


def saved(pair: GraphPair, operator: str) -> int:
    return sum(operator in str(value.source.target).split(".") for value in pair.saved_values())


def residual(x: torch.Tensor) -> torch.Tensor:
    hidden = x @ SQUARES[0]
    for square in SQUARES[1:]:
        hidden = ((hidden @ square).tanh() + hidden).relu()
    return (hidden @ SQUARES[0]).sum()


def gated(x: torch.Tensor) -> torch.Tensor:
    for gate, value, down in (SQUARES[:3], SQUARES[3:]):
        x = (((x @ gate).sigmoid() * (x @ value)) @ down).tanh()
    return x.sum()


def concatenated(x: torch.Tensor) -> torch.Tensor:
    features = x @ SQUARES[0]
    for square in SQUARES[1:]:
        new = features.relu() @ square.repeat(features.shape[1] // 32, 1)
        features = torch.cat([features, new], 1)
    return features.square().sum()


def narrowing(x: torch.Tensor) -> torch.Tensor:
    """A residual stream of 32 columns, and then two of 8 columns: of these, four make as much as the largest join."""
    wide = x @ SQUARES[0]
    wide = (wide @ SQUARES[1] + wide).relu()
    wide = (wide @ SQUARES[2] + wide).relu()
    small = wide @ SQUARES[3][:, :8]
    for _ in range(3):
        small = (small @ SQUARES[4][:8, :8] + small).relu()
    return (small @ SQUARES[5][:8]).square().sum()


def joins(function: Function) -> list[tuple[str, int]]:
    """The joins in the graph of a function: operators, and columns."""
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(X).graph
    return [(str(node.target).split(".")[1], node.meta["val"].shape[1]) for node in find_joins(graph.nodes)]


def test_every_sum_of_a_residual_stream_is_a_join() -> None:
    assert joins(residual) == [("relu", 32)] * 5


@pytest.mark.parametrize("function", [gated, concatenated])
def test_gates_and_concatenations_are_none(function: Function) -> None:
    assert joins(function) == []


def test_small_joins_count_beside_the_largest() -> None:
    assert joins(narrowing) == [("relu", 32), ("relu", 32), ("relu", 8)]


@pytest.mark.parametrize(("budget_bytes", "count"), [(10**6, 5), (None, 0)])
def test_joins_are_saved_where_the_peak_is_limited(trace: Trace, budget_bytes: int | None, count: int) -> None:
    assert saved(trace(residual, X, recompute="auto", budget_bytes=budget_bytes), "relu") == count


def test_what_checkpointing_decided_stays(trace: Trace) -> None:
    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(residual, x @ SQUARES[0], use_reentrant=False)
        return found

    assert saved(trace(checkpointed, X, recompute="auto", budget_bytes=10**6), "relu") == 0
