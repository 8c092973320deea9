"""What models do to logits, element by element, before a loss reads them: add a bias, scale them, cap them softly.

BART and its like add a bias of the classes behind the linear layer, Granite and Cohere multiply by a number, and Gemma
takes ``cap * tanh(logits / cap)``.
"""

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from gact_fx.graphs.tensors import is_subclass

_TIMES = (operator.mul, torch.mul, torch.multiply, "mul", "multiply")
_OVER = (operator.truediv, torch.div, torch.divide, torch.true_divide, "div", "divide", "true_divide")
_PLUS = (operator.add, torch.add, "add")
_TANH = (torch.tanh, "tanh")


@dataclass(frozen=True)
class Scaling:
    """Logits z become ``scale * (z + bias)``; ``cap * tanh(scale * (z + bias))`` where ``cap`` is not 0.

    ``bias`` has one number for each class, and perhaps dimensions of size 1 before.
    """

    scale: float = 1.0
    cap: float = 0.0
    bias: fx.Node | None = None

    def behind(self, node: fx.Node) -> "Scaling | None":
        """This scaling of what ``node`` gives, as one of what it reads; None where it has no such form."""
        other = _other(node)
        if self.bias is not None:
            return None
        if node.target in _TANH:
            return Scaling(1.0, self.scale) if self.scale and not self.cap else None
        if isinstance(other, fx.Node):
            return replace(self, bias=other)
        return replace(self, scale=self.scale * other if node.target in _TIMES else self.scale / other)


def is_scaling(node: fx.Node) -> bool:
    """Whether ``node`` adds numbers of the classes to what it reads, multiplies it by a number, or takes its tanh."""
    source = source_of(node)
    before, after = (None if each is None else each.meta.get("example_value") for each in (source, node))
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or node.kwargs:
        return False
    # Loss and gradient are computed in float32 at least; another precision is the model's own choice.
    if before.shape != after.shape or after.dtype not in (before.dtype, torch.float32) or is_subclass(after):
        return False
    if node.target in _TANH:
        return True
    other = _other(node)
    if isinstance(other, fx.Node):
        return node.target in _PLUS and len(node.args) == 2 and _is_of_classes(other, before.shape[-1])
    is_divided_by = node.target in _OVER and source is node.args[0] and other != 0
    return (node.target in _TIMES or is_divided_by) and isinstance(other, float | int)


def source_of(node: fx.Node) -> fx.Node | None:
    """The tensor with logits among the arguments of ``node``: of two, the one with more elements."""
    tensors = [x for x in node.args[:2] if isinstance(x, fx.Node)]
    sizes = [x.meta["example_value"].numel() if _is_tensor(x) else 0 for x in tensors]
    return tensors[sizes.index(max(sizes))] if tensors else None


def _other(node: fx.Node) -> Any:
    """The argument beside the logits."""
    others = [x for x in node.args[:2] if x is not source_of(node)]
    return others[0] if others else None


def _is_of_classes(node: fx.Node, classes: int) -> bool:
    x = node.meta.get("example_value")
    return isinstance(x, torch.Tensor) and not is_subclass(x) and x.dim() > 0 and x.shape[-1] == x.numel() == classes


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)
