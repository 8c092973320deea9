from collections.abc import Callable

import torch
from conftest import Trace, passes
from torch import fx, nn
from torch.nn import functional as F

from gact_fx.config import Config
from gact_fx.passes.pipeline import Context, run_passes

full = torch.ops.aten.full.default


class Attention(nn.Module):
    """Backward has zeros for rows of scores that see nothing, and scatters rows of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(96, 32), nn.Linear(32, 96)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for _ in range(2):
            q, k, v = self.linear(x).unsqueeze(1).chunk(3, dim=-1)
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).squeeze(1)
        return x.square().sum()


def real(value: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(value.numel())
    number = 0.5 + torch.rand(value.shape, generator=generator)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(number)


def test_no_tensor_is_full_of_one_number(trace: Trace) -> None:
    pair = trace(Attention(), torch.randint(96, (8, 16)), inner="inductor", recompute="auto")
    found = pair.backward.graph.find_nodes(op="call_function", target=full)
    assert sorted(node.meta["val"].numel() for node in found)[-2:] == [8 * 16 * 16, 96 * 32]
    arguments = [real(node.meta["val"]) for node in pair.backward.graph.find_nodes(op="placeholder")]
    before = fx.Interpreter(pair.backward).run(*arguments)
    run_passes(passes("spread_numbers"), Context(Config(), is_profiling=True, pair=pair))
    left = pair.backward.graph.find_nodes(op="call_function", target=full)
    assert all(node.meta["val"].numel() == 1 for node in left)
    for a, b in zip(fx.Interpreter(pair.backward).run(*arguments), before, strict=True):
        assert a is b is None or (torch.equal(a, b) and a.stride() == b.stride())


def spread(trace: Trace, model: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Size]:
    """The sizes of what is full of one number still, in forward."""
    pair = trace(model, *inputs)
    run_passes(passes("spread_numbers"), Context(Config(), is_profiling=True, pair=pair))
    left = pair.forward.graph.find_nodes(op="call_function", target=full)
    return [node.meta["val"].shape for node in left if node.meta["val"].dim()]


def test_a_number_that_is_not_known_stays(trace: Trace) -> None:
    x = torch.randn(8, 16, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    assert not spread(trace, lambda x: (x * torch.full(x.shape, 3.0)).sin().sum(), x)
    assert spread(trace, lambda x: (x * torch.full(x.shape, float(x.shape[0]))).sin().sum(), x)


def test_a_result_keeps_its_layout(trace: Trace) -> None:
    x, y = (torch.randn(size, requires_grad=True) for size in ((16, 8), (8, 16)))
    assert spread(trace, lambda x, y: torch.addcmul(torch.full(y.shape, 2.0), x.t(), y), x, y) == [(8, 16)]
    assert not spread(trace, lambda x, y: torch.addcmul(torch.full(y.shape, 2.0), y, y), x, y)


def test_sizes_that_depend_on_values_stay(trace: Trace) -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.full((y.nonzero().shape[0], 16), 0.5) * x).sin().sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert spread(trace, model, torch.randn(1, 16, requires_grad=True), torch.ones(8))
