"""Every pair of what a training loop may do at once: the gradients are the uncompressed ones within the noise that
`gact_fx.measure_gradient_error` predicts.
"""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

import gact_fx

WIDTH = 32
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Loop:
    """A model and the way it is trained; ``sizes`` are those of the batches, ``parts`` how many make a step."""

    checkpoint: bool = False
    graph_break: bool = False
    dropout: float = 0.0
    autocast: bool = False
    parts: int = 1
    sizes: tuple[int, ...] = (64,)

    def batches(self, step: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(step)
        sizes = [self.sizes[(step + part) % len(self.sizes)] for part in range(self.parts)]
        return [
            (torch.randn(size, WIDTH, generator=generator), torch.randint(0, 8, (size,), generator=generator))
            for size in sizes
        ]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return F.cross_entropy(model(batch[0]).float(), batch[1])

    def gradients(self, model: nn.Module, step: int) -> torch.Tensor:
        model.zero_grad()
        torch.manual_seed(step)
        for batch in self.batches(step):
            (self.loss(model, batch) / self.parts).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


# What a feature changes about the loop. One that wraps the model, as DDP does, adds a field for it to `Loop`.
FEATURES: dict[str, Callable[[Loop], Loop]] = {
    "checkpoint": lambda loop: replace(loop, checkpoint=True),
    "autocast": lambda loop: replace(loop, autocast=True),
    "accumulation": lambda loop: replace(loop, parts=3),
    "dynamic batch": lambda loop: replace(loop, sizes=(64, 48, 56)),
    "graph break": lambda loop: replace(loop, graph_break=True),
    "dropout": lambda loop: replace(loop, dropout=0.2),
}


class Net(nn.Module):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop = loop
        self.a, self.b, self.c = nn.Linear(WIDTH, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 8)

    def block(self, h: torch.Tensor) -> torch.Tensor:
        return h + F.dropout(F.gelu(self.c(F.relu(self.b(h)))), self.loop.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        if self.loop.checkpoint:
            h = torch.utils.checkpoint.checkpoint(self.block, h, use_reentrant=False)
        else:
            h = self.block(h)
        if self.loop.graph_break:
            torch._dynamo.graph_break()
        return self.head(F.gelu(self.block(h)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("pair", itertools.combinations(FEATURES, 2), ids=" and ".join)
def test_pair(pair: tuple[str, str]) -> None:
    loop = Loop()
    for name in pair:
        loop = FEATURES[name](loop)
    model = Net(loop)
    reference = copy.deepcopy(model)
    gact_fx.compile(model, inner="eager", budget_bits=4, min_elements=64)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, reference)]
    errors, predicted = [], []
    for step in range(4):
        found, exact = (loop.gradients(each, step) for each in (model, reference))
        # The first step is profiled, at 8 bits.
        if step:
            errors.append(float((found - exact).square().sum()))
            noise = gact_fx.measure_gradient_error(model, loop.batches(step), loop.loss, draws=3).total.variance
            predicted.append(noise / loop.parts)
        for optimizer in optimizers:
            optimizer.step()
        reference.load_state_dict(model.state_dict())
    assert any(row.encoding == "quantize" for row in gact_fx.inspect(model).rows)
    assert 0.25 < sum(errors) / sum(predicted) < 3, (errors, predicted)
