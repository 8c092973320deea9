import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import Trace, relative_error, run_pass
from torch import nn

import gact_fx
from gact_fx.training.model import session_of

X = torch.randn(8, 8, 16, 16, generator=torch.Generator().manual_seed(5))


class Pools(nn.Module):
    """Nothing but the shape of what is pooled is read in backward."""

    def __init__(self, channels_last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.format = torch.channels_last if channels_last else torch.contiguous_format

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        x = F.avg_pool2d(first(x.to(memory_format=self.format)), 2)
        return F.adaptive_avg_pool2d(second(x), 3).sum()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_what_is_pooled_is_not_saved(inner: str, channels_last: bool) -> None:
    model = Pools(channels_last)
    exact = copy.deepcopy(model)
    exact(X).backward()
    gact_fx.compile(model, inner=inner, budget_bits=8, min_elements=64, sample_batches=[(X,)])
    model(X).backward()
    report = gact_fx.inspect(model)
    rows = [row for row in report.rows if row.bytes_after and "convolution" in row.op]
    assert not rows, rows
    gradients = [[p.grad for p in each.parameters() if p.grad is not None] for each in (model, exact)]
    assert relative_error(*gradients) < 0.01


class Flattened(nn.Module):
    """Layers that flatten their rows, as those of GPT-2 do: backward takes a size of what it flattens."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(32, 32) / 6 for _ in range(3))
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = self.scale * x
            x = torch.mm(x.view(-1, x.size(-1)), weight).view(x.size())
        return x.mean()


@pytest.mark.parametrize("dynamic", [True, False])
def test_no_tensor_bends_in_its_size(dynamic: bool) -> None:
    """Backward of it is linear in all that it saves, whether the rows vary or not."""
    model = gact_fx.compile(Flattened(), inner="eager", dynamic=dynamic, min_elements=64)
    model(torch.randn(64, 8, 32)).backward()
    session = session_of(model)
    assert session is not None
    tensors = [how for profile in session.profiles.values() for _, how in profile.analysis.quantized()]
    assert tensors and not any(how.bends for how in tensors)


def test_a_size_that_is_known_becomes_a_number(trace: Trace) -> None:
    pair = trace(Flattened(), torch.randn(64, 8, 32))
    graph = pair.backward.graph
    tensor = next(node for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor) and node.users)
    reader = next(node for node in graph.nodes if node.target is torch.ops.aten.expand.default)
    with graph.inserting_before(reader):
        size = graph.call_function(torch.ops.aten.sym_size.int, (tensor, 0))
    size.meta["val"] = int(tensor.meta["val"].shape[0])
    shape = list(reader.args[1])
    reader.args = (reader.args[0], [size, *shape[1:]])
    run_pass("read_shapes", pair)
    assert reader.args[1] == [size.meta["val"], *shape[1:]]
    assert all(node.target is not torch.ops.aten.sym_size.int for node in graph.nodes)
