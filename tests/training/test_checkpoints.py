"""Saving, loading, copying and pickling a compiled model, and going on with training where it was left off."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Mixed, mixed_batch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gact_fx


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    return gact_fx.compile(model, inner="eager", min_elements=64, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = mixed_batch()
        loss = model(x.roll(step, 0) + step / 100, y.roll(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_a_loop_resumed_from_a_checkpoint(tmp_path: Path) -> None:
    """Weights, optimizer, plan and random numbers: the losses are those of the loop that was not interrupted."""
    model = compiled(Mixed(dropout=0.1))
    optimizer = adam(model)
    train(model, optimizer, range(4))
    plan = gact_fx.inspect(model).plan
    assert plan is not None
    plan.save(tmp_path / "plan.json")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    torch.save(state, tmp_path / "state.pt")
    straight = train(model, optimizer, range(4, 9))

    torch._dynamo.reset()
    torch.manual_seed(5)
    resumed = compiled(Mixed(dropout=0.1), plan=gact_fx.Plan.load(tmp_path / "plan.json"))
    again = adam(resumed)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    assert train(resumed, again, range(4, 9)) == straight
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(192, 32), nn.Tanh(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x.flatten(1)), y)


def test_the_state_dict_is_that_of_the_model_uncompiled(tmp_path: Path) -> None:
    model = Small()
    keys = list(model.state_dict())
    compiled(model)
    train(model, adam(model), range(3))
    assert list(model.state_dict()) == keys and type(model) is Small
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    plain = Small()
    plain.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    model.train(False), plain.train(False)
    with torch.no_grad():
        torch.testing.assert_close(plain(*mixed_batch()), model(*mixed_batch()))


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded]
)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_copy_is_not_compiled_and_says_so(copied: Any, steps: int) -> None:
    """As copies of what nn.Module.compile compiled are not; with the plan of the original it goes on as that does."""
    model = compiled(Small())
    train(model, adam(model), range(steps))
    twin = copied(model)
    report = gact_fx.inspect(twin)
    assert "this copy of a compiled model is not compiled" in report.note and not report.rows
    assert report.plan == gact_fx.inspect(model).plan
    if copied is copy.copy:
        return  # it shares the parameters
    state = {name: value.clone() for name, value in model.state_dict().items()}
    train(twin, adam(twin), range(1))
    # The copy is a model of its own, and the original still compiled.
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    twin.load_state_dict(state)
    compiled(twin, plan=report.plan)
    steps = range(3) if report.plan is not None else range(1)  # type: ignore[assignment]
    assert train(twin, adam(twin), steps) == train(model, adam(model), steps)  # type: ignore[arg-type]
    # Where the one step was profiled, the report is what its plan predicts.
    assert gact_fx.inspect(twin).ratio > 2 and bool(gact_fx.inspect(twin).graphs) == (report.plan is not None)
    assert "copy" not in gact_fx.inspect(model).note + gact_fx.inspect(twin).note


def test_checkpointing_around_dropout_alone() -> None:
    """What draws a region's numbers again has no value that tracing notes."""
    torch.manual_seed(0)
    last = nn.Linear(256, 10)
    layers = nn.ModuleList([nn.Linear(64, 256), nn.Dropout(0.5), last])

    def loss(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return (x * x.detach()).sum()

    compressed = gact_fx.compile(loss, budget_bits=8, inner="eager", min_elements=64)
    for _ in range(2):
        layers.zero_grad()
        value = compressed(torch.randn(128, 64))
        value.backward()
        # The loss is linear in the last layer but for its detached factor.
        found = sum(float((p.grad * p).sum()) for p in last.parameters() if p.grad is not None)
        assert found == pytest.approx(float(value), rel=0.01)
