"""Names of modules as the user knows them, from Dynamo's expressions."""

import pytest
import torch
from torch import fx, nn

import gact_fx
from gact_fx.graphs.module_names import module_path


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ("L['function'].__self__.bert.encoder.layer.0", "bert.encoder.layer.0"),
        ("L['self']", ""),
        ("L['self'].conv", "conv"),
        ('L["self"]._modules["conv"]', "conv"),
        ("L['function'].__self__._modules['stages']._modules['0'].linear", "stages.0.linear"),
        ("L['self'].experts['left'][3].up", "experts.left.3.up"),
        ("getattr(L['self'].layers, '0').up", "layers.0.up"),
        ("G['net'].0", "net.0"),
        ("L['task'].model.0", "task.model.0"),
        ("self.conv", "conv"),
    ],
)
def test_expressions_of_dynamo_become_names(expression: str, name: str) -> None:
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"1": (expression, nn.Linear)}
    assert module_path(node) == name


class Block(nn.Module):
    """With a graph break, behind which Dynamo knows nothing of the modules around it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        torch._dynamo.graph_break()
        return torch.tanh(self.linear(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.square().mean()


def test_behind_a_graph_break_modules_have_their_full_names() -> None:
    model = gact_fx.compile(Stack(), inner="eager", min_elements=64)
    for _ in range(2):
        model(torch.randn(32, 64)).backward()
    named = {row.module for row in gact_fx.inspect(model).rows if row.module}
    assert named and named <= {name for name, _ in model.named_modules()}
    assert named == {"stages.0", "stages.1"}


class Scores(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scores = nn.Linear(64, 64), Scores()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.linear(x)).square().mean()


def test_what_backward_makes_is_of_the_module_that_it_derives() -> None:
    model = gact_fx.compile(Attention(), inner="eager", min_elements=64)
    for _ in range(2):
        model(torch.randn(4, 32, 64)).backward()
    modules = {row.op: row.module for row in gact_fx.inspect(model).rows if row.bytes_before}
    assert modules["aten.bmm"] == modules["aten._softmax"] == "scores"
