import torch
from conftest import Trace, run_pass
from torch import nn

from gact_fx.graphs.operators import returns_alias


class Products(nn.Module):
    """Backward reads what the products read, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x = (x @ x.transpose(1, 2)).softmax(-1) @ x
        return x.square().sum()


def test_every_view_stands_behind_what_it_is_a_view_of(trace: Trace) -> None:
    pair = trace(Products(), torch.randn(4, 16, 32))

    def distances() -> list[int]:
        place = {node: index for index, node in enumerate(pair.forward.graph.nodes)}
        views = [node for node in place if node.op == "call_function" and returns_alias(node.target)]
        made = [max(place[source] for source in view.all_input_nodes) for view in views]
        # Other views of the same tensor may lie between.
        between = [list(place)[start + 1 : place[view]] for start, view in zip(made, views, strict=True)]
        return [sum(node.op == "call_function" and not returns_alias(node.target) for node in each) for each in between]

    arguments = [
        torch.randn(node.meta["val"].shape, generator=torch.Generator().manual_seed(index))
        for index, node in enumerate(pair.forward.graph.find_nodes(op="placeholder"))
    ]
    before = torch.fx.Interpreter(pair.forward).run(*arguments)
    assert max(distances()) > 5
    run_pass("hoist_views", pair)
    assert max(distances()) == 0
    pair.forward.graph.lint()
    for a, b in zip(torch.fx.Interpreter(pair.forward).run(*arguments), before, strict=True):
        assert torch.equal(a, b)


class Counting(nn.Module):
    """The new value of a buffer is known before the old one was read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("last", torch.zeros(32))
        self.last: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, hidden = x.detach().mean(0), self.linear(x)
        seen = (self.last + hidden.detach()).sum()
        self.last.copy_(mean)
        return hidden.square().sum() + seen


def test_what_writes_to_an_input_waits_for_those_who_read_it(trace: Trace) -> None:
    pair = trace(Counting(), torch.randn(16, 32), inner="inductor")
    run_pass("hoist_views", pair)
    (write,) = pair.forward.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    buffer = write.args[0]
    assert isinstance(buffer, torch.fx.Node)
    assert len(buffer.users) > 1 and max(buffer.users) is write
