"""Both gradients of a convolution are computed one after the other."""

import copy
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from conftest import Trace, gradients, relative_error, run_pass
from peak_bytes import peak_bytes
from torch import nn

import gact_fx

aten = torch.ops.aten
# The package has the function by that name.
MODULE = sys.modules["gact_fx.passes.split_convolutions"]
GRADIENT = torch.ops.gact_fx.convolution_gradient.default


class Convolutions(nn.Module):
    """Of one group and of several, strided, transposed, and of one dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.line = nn.Conv1d(8, 8, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.grouped(self.one(x.tanh()).tanh()).tanh()
        return self.line(self.up(x).tanh().flatten(2)).tanh().square().mean()


def in_format(model: nn.Module, memory_format: torch.memory_format) -> nn.Module:
    return model.to(memory_format=memory_format)  # type: ignore[call-overload]


def image(memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 8, 16, 18).to(memory_format=memory_format).requires_grad_()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_are_the_same(
    inner: str, memory_format: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "LEAST_NBYTES", 0)
    monkeypatch.setattr(MODULE, "NEAR", 0)
    monkeypatch.setattr(MODULE, "LEAST_SHARE", 0)
    model, reference = (in_format(Convolutions(), memory_format) for _ in range(2))
    gact_fx.compile(model, budget_bits=8, inner=inner, min_elements=10**9)
    for _ in range(3):
        x, y = image(memory_format), image(memory_format)
        for network, given in ((model, x), (reference, y)):
            network.zero_grad()
            network(given).backward()
        assert x.grad is not None and y.grad is not None
        assert relative_error([*gradients(model), x.grad], [*gradients(reference), y.grad]) < 1e-5
    graph = gact_fx.inspect(model).graphs[0].backward.graph
    assert len(graph.find_nodes(op="call_function", target=GRADIENT)) == 3


@pytest.mark.parametrize(("least", "count"), [(0, 3), (10**9, 0)])
def test_small_ones_and_groups_stay_whole(
    trace: Trace, least: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "LEAST_NBYTES", least)
    monkeypatch.setattr(MODULE, "NEAR", 0)
    monkeypatch.setattr(MODULE, "LEAST_SHARE", 0)
    pair = trace(Convolutions(), image(), inner="inductor")
    run_pass("split_convolutions", pair)
    graph = pair.backward.graph
    assert len(graph.find_nodes(op="call_function", target=GRADIENT)) == count
    assert len(graph.find_nodes(op="call_function", target=aten.convolution_backward.default)) == 4


@pytest.mark.parametrize(
    "make",
    [
        partial(nn.Conv2d, 8, 8, 3, stride=[2]),  # type: ignore[arg-type]
        partial(nn.ConvTranspose2d, 8, 8, 3, stride=1, dilation=2, padding=1, output_padding=1),
        partial(nn.ConvTranspose2d, 8, 8, 3, stride=2, dilation=3, output_padding=2),
        partial(nn.ConvTranspose2d, 8, 8, 3, stride=2, dilation=2, output_padding=1),
        partial(nn.Conv2d, 8, 8, 3, stride=3, dilation=2, padding=2),
        partial(nn.Conv2d, 8, 8, 3, padding="same", padding_mode="reflect"),
    ],
)
def test_gradients_of_unusual_convolutions(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST_NBYTES", "NEAR", "LEAST_SHARE"):
        monkeypatch.setattr(MODULE, name, 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), make(), nn.Tanh())
    reference = copy.deepcopy(model)
    gact_fx.compile(model, budget_bits=8, inner="eager", min_elements=10**9)
    for _ in range(2):
        for network in (model, reference):
            network.zero_grad()
            network(image()).square().mean().backward()
    assert relative_error(gradients(model), gradients(reference)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_those_of_16_bits_stay_whole(trace: Trace, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "LEAST_NBYTES", 0)
    monkeypatch.setattr(MODULE, "NEAR", 0)
    monkeypatch.setattr(MODULE, "LEAST_SHARE", 0)
    pair = trace(Convolutions().to(dtype), image().detach().to(dtype).requires_grad_(), inner="inductor")
    run_pass("split_convolutions", pair)
    assert not pair.backward.graph.find_nodes(op="call_function", target=GRADIENT)


class Wide(nn.Module):
    """What the second convolution reads is most of what there is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Conv2d(8, 128, 3, padding=1), nn.Conv2d(128, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x)).square().mean()


def test_the_input_is_gone_before_its_gradient_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {}
    # In other memory formats libraries make copies of their own.
    x = torch.randn(4, 8, 64, 64).to(memory_format=torch.channels_last)
    for least in (0, 10**9):
        monkeypatch.setattr(MODULE, "LEAST_NBYTES", least)
        model = in_format(Wide(), torch.channels_last)
        gact_fx.compile(model, budget_bits=8, adaptive=False, inner="eager")
        for _ in range(2):
            model(x).backward()
        loss = model(x)
        peaks[least] = peak_bytes(partial(torch.clone, loss)).step
    assert peaks[0] < peaks[10**9] - 0.9 * 16 * x.nbytes


def test_what_reads_the_gradient_may_be_the_next_call(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a part of it is copied: there it is not made behind the other gradients."""
    monkeypatch.setattr(MODULE, "LEAST_NBYTES", 0)
    monkeypatch.setattr(MODULE, "NEAR", 0)
    monkeypatch.setattr(MODULE, "LEAST_SHARE", 0)
    pair = trace(Wide(), torch.randn(2, 8, 8, 8), inner="inductor")
    graph = pair.backward.graph
    parts = {node.args: node for node in graph.nodes if "getitem" in str(node.target)}
    first = min(node for (_, index), node in parts.items() if index == 0)
    with graph.inserting_after(first):
        graph.call_function(aten.neg.default, (first,))
    run_pass("split_convolutions", pair)
    graph.lint()
    assert graph.find_nodes(op="call_function", target=GRADIENT)


def test_far_from_the_peak_one_call_computes_both(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "LEAST_NBYTES", 0)
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 512, 3), nn.Conv2d(512, 8, 3))
    pair = trace(model, torch.randn(2, 8, 32, 32, requires_grad=True), inner="inductor")
    run_pass("split_convolutions", pair)
    found = pair.backward.graph.find_nodes(op="call_function", target=GRADIENT)
    assert [node.meta["val"].shape[1] for node in found] == [512]
