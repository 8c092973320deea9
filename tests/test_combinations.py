"""Every pair of what a training loop may do at once: the gradients are the uncompressed ones within the noise that
`gact_fx.measure_gradient_error` predicts.
"""

import contextlib
import copy
import itertools
import json
import logging
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.nn import functional as F

import gact_fx

WIDTH = 32
STEPS = 3
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Loop:
    """A model and the way it is trained; ``sizes`` are those of the batches, ``parts`` how many make a step.

    Under DDP every one of the ``ranks`` has batches and dropout masks of its own.
    """

    checkpoint: bool = False
    graph_break: bool = False
    dropout: float = 0.0
    autocast: bool = False
    parts: int = 1
    sizes: tuple[int, ...] = (64,)
    ranks: int = 1
    rank: int = 0

    def batches(self, step: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(100 * self.rank + step)
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
        torch.manual_seed(100 * self.rank + step)
        *before, last = self.batches(step)
        with model.no_sync() if self.ranks > 1 else contextlib.nullcontext():  # type: ignore[operator]
            for batch in before:
                (self.loss(model, batch) / self.parts).backward()
        (self.loss(model, last) / self.parts).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


# What a feature changes about the loop.
FEATURES: dict[str, Callable[[Loop], Loop]] = {
    "checkpoint": lambda loop: replace(loop, checkpoint=True),
    "autocast": lambda loop: replace(loop, autocast=True),
    "accumulation": lambda loop: replace(loop, parts=3),
    "dynamic batch": lambda loop: replace(loop, sizes=(64, 48, 56)),
    "graph break": lambda loop: replace(loop, graph_break=True),
    "dropout": lambda loop: replace(loop, dropout=0.2),
    "DDP": lambda loop: replace(loop, ranks=2),
}
PAIRS = list(itertools.combinations(FEATURES, 2))


class Net(nn.Module):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop = loop
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 8)

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
        return self.head(F.dropout(F.gelu(self.c(h)), self.loop.dropout))


@dataclass(frozen=True)
class Outcome:
    """Squared errors of the steps' gradients, their mean as predicted by this process, and of how many tensors."""

    errors: list[float]
    predicted: float
    quantized: int


def train(pair: tuple[str, str], rank: int = 0) -> Outcome:
    loop = Loop(rank=rank)
    for name in pair:
        loop = FEATURES[name](loop)
    torch.manual_seed(0)
    net = Net(loop)
    reference = copy.deepcopy(net)
    gact_fx.compile(net, inner="eager", budget_bits=4, min_elements=64)
    models: list[nn.Module] = [net, reference]
    if loop.ranks > 1:
        models = [nn.parallel.DistributedDataParallel(each) for each in models]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.02) for each in models]
    errors = []
    for step in range(STEPS):
        found, exact = (loop.gradients(each, step) for each in models)
        errors.append(float((found - exact).square().sum()))
        for optimizer in optimizers:
            optimizer.step()
        reference.load_state_dict(net.state_dict())
    # The first step is profiled, at 8 bits. Parameters change little, and measuring at each step compiles every time.
    batches = [batch for step in range(1, STEPS) for batch in loop.batches(step)]
    noise = gact_fx.measure_gradient_error(net, batches, loop.loss, draws=3).total.variance / loop.parts
    return Outcome(errors[1:], noise, sum(row.encoding == "quantize" for row in gact_fx.inspect(net).rows))


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("gact_fx").setLevel(logging.ERROR)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, timeout=timedelta(minutes=1), rank=rank, world_size=2)
    found: dict[str, Any] = {}
    for pair in PAIRS:
        if "DDP" in pair:
            torch._dynamo.reset()
            # One that fails on both ranks leaves the others their say.
            try:
                found[" and ".join(pair)] = asdict(train(pair, rank))
            except Exception as error:
                found[" and ".join(pair)] = repr(error)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the pairs with DDP came to, by rank; in one pair of processes, which takes seconds to start."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(work, (port, str(folder)), 2)  # type: ignore[attr-defined, no-untyped-call]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def check(outcomes: list[Outcome]) -> None:
    """Of ranks that have the same gradients, the mean of their own, whose noise is independent."""
    errors = outcomes[0].errors
    predicted = sum(outcome.predicted for outcome in outcomes) / len(outcomes) ** 2
    assert all(outcome.quantized and outcome.errors == errors for outcome in outcomes)
    assert 0.5 < sum(errors) / len(errors) / predicted < 2, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "DDP" not in pair], ids=" and ".join)
def test_pair(pair: tuple[str, str]) -> None:
    check([train(pair)])


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "DDP" in pair], ids=" and ".join)
def test_pair_with_ddp(ranks: list[dict[str, Any]], pair: tuple[str, str]) -> None:
    outcomes = [each[" and ".join(pair)] for each in ranks]
    assert all(isinstance(outcome, dict) for outcome in outcomes), outcomes
    check([Outcome(**outcome) for outcome in outcomes])
