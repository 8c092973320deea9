"""Nothing is left behind by a step, and the same steps give the same bits."""

import gc
import warnings

import pytest
import torch
from conftest import Mixed, mixed_batch

import gact_fx


def live_tensors() -> int:
    gc.collect()
    # Some things that torch keeps warn of their age when they are looked at.
    warnings.simplefilter("ignore", FutureWarning)
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def train(steps: int) -> tuple[list[float], list[torch.Tensor], list[int]]:
    """Losses, parameters, and the tensors alive after every tenth step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = gact_fx.compile(Mixed(dropout=0.1), inner="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses, alive = [], []
    for step in range(1, steps + 1):
        loss = model(*mixed_batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        del loss
        if step % 10 == 5:
            alive.append(live_tensors())
    return losses, [p.detach().clone() for p in model.parameters()], alive


@pytest.mark.slow
def test_the_same_twice_and_nothing_left_behind() -> None:
    one, other = train(26), train(26)
    assert one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    assert one[0][-1] < one[0][0]
    # The first count is taken after the plan was compiled; what the first training left may still go in the second.
    assert all(alive[0] >= alive[1] >= alive[2] for _, _, alive in (one, other))
