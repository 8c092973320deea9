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
