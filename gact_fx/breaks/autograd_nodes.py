"""What eager PyTorch's autograd nodes do with the tensors that they save, and so how each may be stored."""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gact_fx.graphs.autograd_graph import saved_number
from gact_fx.graphs.trees import tree_leaves


class Treatment(enum.Enum):
    """How a saved tensor may be stored."""

    CODE = "code"
    SIGN = "sign"  # backward only asks where it is positive
    EXPONENTIAL = "exponential"  # backward reads its exponential
    EXACT = "exact"


@dataclass(frozen=True)
class Use:
    """What saved a tensor: the autograd node's name, and the attribute that reads it."""

    node: str
    attribute: str
    treatment: Treatment

    def __str__(self) -> str:
        return f"{self.node}.{self.attribute}" if self.attribute else self.node


# Nodes whose backward is linear in these saved tensors, or bends gently, without steps or poles.
_SMOOTH: dict[str, tuple[str, ...]] = {
    "AddmmBackward0": ("mat1", "mat2"),
    "AddbmmBackward0": ("batch1", "batch2"),
    "BaddbmmBackward0": ("batch1", "batch2"),
    "BmmBackward0": ("self", "mat2"),
    "MmBackward0": ("self", "mat2"),
    "MvBackward0": ("self", "vec"),
    "LinearBackward0": ("input", "weight"),
    "ConvolutionBackward0": ("input", "weight"),
    "MkldnnConvolutionBackward0": ("input", "weight"),
    "SparseAddmmBackward0": ("mat1", "mat2"),
    "MulBackward0": ("self", "other"),
    "AddcmulBackward0": ("tensor1", "tensor2"),
    "DivBackward0": ("self",),
    "NativeLayerNormBackward0": ("input",),
    "NativeGroupNormBackward0": ("input",),
    "NativeBatchNormBackward0": ("input",),
    "CudnnBatchNormBackward0": ("input",),
    "FusedRmsNormBackward0": ("input",),
    "GeluBackward0": ("self",),
    "SiluBackward0": ("self",),
    "MishBackward0": ("self",),
    "SoftplusBackward0": ("self",),
    "TanhBackward0": ("result",),
    "SigmoidBackward0": ("result",),
    "ExpBackward0": ("result",),
    "SoftmaxBackward0": ("result",),
    # They read the shape alone.
    "MaxPool2DWithIndicesBackward0": ("self",),
    "MaxPool3DWithIndicesBackward0": ("self",),
    "AvgPool2DBackward0": ("self",),
    "AdaptiveAvgPool2DBackward0": ("self",),
}
_POSITIVE = {"ReluBackward0": "result", "LeakyReluBackward0": "self"}


def treatment(node: Any, attribute: str, dtype: torch.dtype) -> Treatment:
    """How a tensor, which ``node`` reads as ``attribute``, may be stored."""
    name = node.name()
    if dtype is torch.bool:
        return Treatment.CODE
    if (name, attribute) == ("LogSoftmaxBackward0", "result"):
        return Treatment.EXPONENTIAL
    if _POSITIVE.get(name) == attribute:
        return Treatment.SIGN
    # Its derivative is linear in what was squared; other powers bend, or have a pole.
    if name == "PowBackward0" and attribute == "self" and saved_number(node, "exponent") == 2:
        return Treatment.CODE
    return Treatment.CODE if attribute in _SMOOTH.get(name, ()) else Treatment.EXACT


def nodes_of(result: Any, inputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The autograd nodes between a model's inputs and the tensors in its result, whatever it is made of, each once."""
    leaves = tree_leaves(result)
    # Results that are objects of a class of their own, dataclasses say.
    leaves += tree_leaves([list(getattr(leaf, "__dict__", {}).values()) for leaf in leaves if not callable(leaf)])
    stack = [leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor)]
    seen: set[Any] = {x.grad_fn for x in inputs}
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(following for following, _ in node.next_functions)
