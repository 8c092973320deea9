from __future__ import annotations

import copy

import pytest
import torch
from activation_bytes import activation_bytes
from conftest import Mixed, mixed_batch
from torch import nn

import gact_fx
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


def whole(model: nn.Module) -> int:
    """What the model's graphs would hold under plain torch.compile."""
    session = session_of(model)
    assert session is not None
    return sum(profile.runs * profile.plain.held for profile in session.profiles.values())


def test_a_share_is_of_what_torch_compile_holds() -> None:
    """To the byte, under Inductor."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(256), nn.Linear(256, 64))
    x = torch.randn(128, 64)
    plain = gact_fx.compile(copy.deepcopy(model), budget_bits=None)
    ours = gact_fx.compile(model, budget_bytes="15%", min_elements=64)
    found = held(ours, x)
    assert whole(ours) == held(plain, x)
    assert 0.13 * whole(ours) < found <= 0.15 * whole(ours)


@pytest.mark.parametrize("recompute", ["off", "auto", "full"])
def test_a_share_is_kept_however_much_is_computed_again(recompute: str) -> None:
    model = gact_fx.compile(Mixed(), inner="eager", budget_bytes="25%", recompute=recompute, min_elements=64)
    found = held(model, *mixed_batch(32))
    assert 0.22 * whole(model) < found <= 0.25 * whole(model)
    # The same whatever is computed again.
    assert whole(model) == pytest.approx(2.5e6, rel=0.02)


def test_a_share_over_a_graph_that_runs_several_times() -> None:
    x = torch.randn(WIDTH, WIDTH)
    for share in (0.2, 0.4):
        model = gact_fx.compile(Broken(), inner="eager", budget_bytes=f"{100 * share}%", min_elements=64)
        found = held(model, x)
        # What GELU reads, from which the partitioner computes the rest again.
        assert whole(model) == 3 * 4 * WIDTH * WIDTH
        assert 0.8 * share * whole(model) < found <= share * whole(model)


def test_nobody_weighs_where_the_budget_is_no_share() -> None:
    model = gact_fx.compile(Mixed(), inner="eager", budget_bytes="100kB", sample_batches=[mixed_batch()])
    model(*mixed_batch()).backward()
    assert all(stage.name != "weigh_plain_cut" for stage in gact_fx.inspect(model).graphs[0].stages)
