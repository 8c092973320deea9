"""One compiled model in several threads at once."""

import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import gact_fx


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns far more often than they would."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="with torch 2.11 Dynamo may crash where threads compile and run")
@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("has_samples", [pytest.param(True, marks=pytest.mark.slow), False])
def test_four_threads_train_one_model(has_samples: bool) -> None:
    """Graphs that one thread runs operator by operator must not be seen by what another one traces."""
    x = torch.randn(64, 64)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(6)]
    samples = {"sample_batches": [(x,)], "loss_fn": lambda m, b: m(*b).square().mean()} if has_samples else {}
    model = gact_fx.compile(nn.Sequential(*layers), inner="eager", **samples)  # type: ignore[arg-type]
    failed: list[BaseException] = []

    def train() -> None:
        try:
            for _ in range(10):
                model(x).square().mean().backward()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
