from __future__ import annotations

import copy

import pytest
import torch
from activation_bytes import activation_bytes
from conftest import Mixed, mixed_batch
from torch import nn

import gact_fx
from gact_fx.graphs.step_memory import PairMemory
from gact_fx.planning.planned_memory import plain_memory
from gact_fx.training.model import session_of

WIDTH = 64


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.linear(x)).sin()


class Broken(nn.Module):
    """One graph, which runs three times in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        torch._dynamo.graph_break()
        x = self.block(x)
        torch._dynamo.graph_break()
        return self.block(x)


def held(model: nn.Module, *batch: torch.Tensor) -> int:
    """What is held for backward in the second step of two."""
    for _ in range(2):
        result = model(*batch)
        found = activation_bytes(result, [*model.parameters(), *model.buffers(), *batch])
        result.sum().backward()
    return found


def plain(model: nn.Module) -> PairMemory:
    """What the model's graph would have in memory under plain torch.compile."""
    session = session_of(model)
    assert session is not None
    (profile,) = session.profiles.values()
    return profile.plain


def test_what_torch_compile_holds_is_known_to_the_byte() -> None:
    """Under Inductor."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(256), nn.Linear(256, 64))
    x = torch.randn(128, 64)
    reference = gact_fx.compile(copy.deepcopy(model), budget_bits=None)
    ours = gact_fx.compile(model, budget_bytes="60%", min_elements=64)
    held(ours, x)
    assert plain(ours).held == held(reference, x)


@pytest.mark.slow
def test_a_share_is_of_the_same_whatever_is_computed_again() -> None:
    found = []
    for recompute in ("off", "auto", "full"):
        model = gact_fx.compile(Mixed(), inner="eager", budget_bytes="90%", recompute=recompute, min_elements=64)
        found.append((held(model, *mixed_batch(32)), plain(model)))
    wholes = {memory.activations for _, memory in found}
    assert len(wholes) == 1 and all(nbytes <= 0.9 * wholes.copy().pop() for nbytes, _ in found)


def test_what_a_graph_holds_that_runs_several_times() -> None:
    x = torch.randn(WIDTH, WIDTH)
    model = gact_fx.compile(Broken(), inner="eager", budget_bytes="60%", min_elements=64)
    held(model, x)
    session = session_of(model)
    assert session is not None
    # What GELU reads, from which the partitioner computes the rest again.
    assert plain_memory(session.profiles.values(), 0).held == 3 * 4 * WIDTH * WIDTH


def test_nobody_weighs_where_the_budget_is_no_share() -> None:
    model = gact_fx.compile(Mixed(), inner="eager", budget_bytes="100kB", sample_batches=[mixed_batch()])
    model(*mixed_batch()).backward()
    assert all(stage.name != "weigh_plain_cut" for stage in gact_fx.inspect(model).graphs[0].stages)
