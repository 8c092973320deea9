"""A clear error where somebody differentiates the gradients that a compiled model gave.

AOTAutograd's backward pass has no derivative (torch 2.11 to 2.13), and says so without a way out. Gradients that come
with ``create_graph=True`` therefore pass through a function whose own derivative is the error: autograd meets it first.

Private, tried with torch 2.11 and 2.13: the name of AOTAutograd's node, "CompiledFunctionBackward" (public would be its
class).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import Node

from gact_fx.errors import StepError
from gact_fx.graphs.trees import tree_leaves

# Behind an output that is a view, or an input written to, there are nodes of autograd's own.
_DEPTH = 3
_MESSAGE = (
    "gact_fx: the gradients of a compiled model cannot be differentiated again (double backward, as in a gradient "
    "penalty or a Hessian); run the forward pass that needs it uncompiled, within "
    'torch.compiler.set_stance("force_eager")'
)


def refuse_double_backward(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """``compiled``, a graph with its backward pass, whose gradients raise an error that names the way out."""

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        outputs = compiled(*args)
        node = _backward_node(outputs)
        if node is not None:
            node.register_hook(_refuse)
        return outputs

    return call


def _backward_node(outputs: Any) -> Node | None:
    """AOTAutograd's node, which all outputs have in common."""
    for output in tree_leaves(outputs):
        nodes = [output.grad_fn] if isinstance(output, torch.Tensor) and output.grad_fn is not None else []
        for _ in range(_DEPTH):
            found = next((node for node in nodes if node.name() == "CompiledFunctionBackward"), None)
            if found is not None:
                return found
            nodes = [following for node in nodes for following, _ in node.next_functions if following is not None]
    return None


def _refuse(gradients: tuple[torch.Tensor | None, ...], arriving: object) -> tuple[torch.Tensor | None, ...] | None:
    if not any(gradient is not None and gradient.requires_grad for gradient in gradients):
        return None
    return tuple(g if g is None or not g.requires_grad else _Once.apply(g) for g in gradients)  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *arriving: torch.Tensor) -> None:
        raise StepError(_MESSAGE)
