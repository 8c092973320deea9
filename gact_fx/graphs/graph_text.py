"""Graphs as text for people, a line for each node.

Passes keep the text of the graphs that they edit; a module's own code takes ten times as long to write.
"""

from typing import Any

import torch
from torch import fx

from gact_fx.graphs.operators import OpOverload


def graph_text(graph: fx.Graph) -> str:
    """``graph`` as lines like ``mul: float32[8, 16] = aten.mul.Tensor(x, 2.0)``."""
    return "\n".join(map(_line, graph.nodes))


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]!r}"
    name = f"{node.name}{_type(node.meta.get('val'))}"
    if node.op == "placeholder":
        return name
    if node.op == "get_attr":
        return f"{name} = self.{node.target}"
    arguments = [*map(repr, node.args), *(f"{key}={value!r}" for key, value in node.kwargs.items())]
    return f"{name} = {_target(node.target)}({', '.join(arguments)})"


def _type(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    return f": {str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


def _target(target: Any) -> str:
    return str(target) if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))
