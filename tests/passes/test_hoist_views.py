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
