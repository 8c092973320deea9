"""What `inspect` says of models that run graphs of several sizes: the largest training step and the last one."""

import pytest
import torch
from activation_bytes import activation_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint

import gact_fx
from gact_fx import Report

WIDTH = 64


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def batch(rows: int) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))


def step(model: nn.Module, x: torch.Tensor) -> int:
    """One training step; the bytes held between forward and backward."""
    loss = model(x)
    held = activation_bytes(loss, exclude=[*model.parameters(), x])
    loss.backward()
    return held


def sizes(report: Report) -> dict[str, int]:
    return {found.name: found.bytes_after for found in report.steps}


@pytest.mark.parametrize("dynamic", [False, None])
def test_a_partial_last_batch_is_the_last_step_and_not_the_largest(dynamic: bool | None) -> None:
    x, part = batch(512), batch(200)
    model = gact_fx.compile(Network(), inner="eager", dynamic=dynamic, min_elements=64, sample_batches=[x])
    for _ in range(2):
        whole = step(model, x)
    assert sizes(gact_fx.inspect(model)) == {"largest": pytest.approx(whole, rel=0.02)}
    for _ in range(4):
        rest = step(model, part)
    report = gact_fx.inspect(model)
    assert sizes(report) == {"largest": pytest.approx(whole, rel=0.02), "last": pytest.approx(rest, rel=0.02)}
    assert report.bytes_after == pytest.approx(whole, rel=0.02)
    assert len(report.graphs) == 2 and {row.graph for row in report.rows} == {0}
    assert "largest step:" in str(report) and "last step:" in str(report)


def test_graphs_of_varying_sizes_count_as_they_ran() -> None:
    model = gact_fx.compile(Network(), inner="eager", dynamic=True, min_elements=64, sample_batches=[batch(128)])
    held = {rows: step(model, batch(rows)) for rows in (128, 1024, 256)}
    report = gact_fx.inspect(model)
    assert sizes(report) == {"largest": pytest.approx(held[1024], rel=0.02), "last": pytest.approx(held[256], rel=0.02)}


def test_what_checkpointing_runs_in_backward_belongs_to_the_step() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x))

    layer = gact_fx.compile(Layer(), inner="eager", min_elements=64)
    for _ in range(3):
        x = batch(64)
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=False)
        x.square().mean().backward()
    (largest,) = gact_fx.inspect(layer).steps
    assert sum(graph.runs for graph in largest.graphs if graph.graph is not None) == 2


def test_before_the_first_step_the_prediction_is_shown() -> None:
    x = batch(512)
    model = gact_fx.compile(Network(), inner="eager", min_elements=64, sample_batches=[x])
    predicted = gact_fx.inspect(model)
    assert [found.name for found in predicted.steps] == ["predicted"] and "as predicted" in str(predicted)
    assert predicted.bytes_after == pytest.approx(step(model, x), rel=0.02)
    assert gact_fx.inspect(model).bytes_after == predicted.bytes_after
