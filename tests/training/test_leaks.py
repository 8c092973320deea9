"""What a step computed does not outlive it: batches, and activations between graphs."""

import gc
import weakref

import pytest
import torch
from torch import nn

import gact_fx


class Broken(nn.Module):
    """Two graphs; notes what goes from the first to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.seen: list[weakref.ref[torch.Tensor]] = []

    @torch.compiler.disable
    def note(self, hidden: torch.Tensor) -> None:
        self.seen.append(weakref.ref(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x).tanh()
        self.note(hidden)
        loss: torch.Tensor = self.b(hidden).tanh().square().mean()
        return loss


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["compile", pytest.param("backend", marks=pytest.mark.slow)])
def test_no_batch_and_no_activation_outlives_its_step(way: str, inner: str) -> None:
    model = Broken()
    compiled = (
        gact_fx.compile(model, inner=inner)
        if way == "compile"
        else torch.compile(model, backend="gact", options={"inner": inner})
    )
    for _ in range(3):
        x = torch.randn(256, 64, requires_grad=True)
        model.seen.append(weakref.ref(x))
        compiled(x).backward()
    del x
    gc.collect()
    assert len(model.seen) == 6 and [each() is None for each in model.seen] == [True] * 6
