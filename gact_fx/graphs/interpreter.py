"""Runs a graph operator by operator in eager PyTorch, with the meaning that Inductor gives its own operators.

Private, tried with torch 2.11 and 2.13: ``torch._decomp.get_decompositions`` (public would be a table for training,
as ``torch.export.default_decompositions`` is one for inference), and by name alone, without an import, Inductor's
operators ``prims.inductor_random``, ``inductor_randint`` and ``_low_memory_max_pool_offsets_to_indices`` (public would
be these in eager PyTorch).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions

from gact_fx.graphs.attention import spelled_attention, spelled_attention_backward
from gact_fx.graphs.convolution_derivative import differentiable_convolution_backward
from gact_fx.graphs.operator_table import FUSED_ATTENTION
from gact_fx.graphs.product_derivative import differentiable_product
from gact_fx.graphs.recurrent_layer import differentiable_backward

aten = torch.ops.aten
_BLOCKS = 8


class GraphInterpreter(fx.Interpreter):
    """An ``fx.Interpreter`` for partitioned graphs.

    Inductor's random numbers are functions of their seeds, as in its own code (operator by operator PyTorch would
    ignore the seed and draw anew), so that forward and a backward that draws them again agree. They are not the same
    numbers as those of the compiled code.

    With ``differentiable`` autograd can go through what is run: casts, copies, recurrent layers and fused attention,
    which have no second derivative, are spelled out, attention without its dropout. So is the backward of
    normalisation: to PyTorch's second derivative the saved mean and deviation are functions of the input, but they are
    inputs of their own. Convolutions have a second derivative that takes less time and memory than PyTorch's, and
    products of two tensors one that takes less memory.
    """

    def __init__(self, module: fx.GraphModule, *, differentiable: bool = False) -> None:
        super().__init__(module)
        self._calls = {**_AS_INDUCTOR, **(_DIFFERENTIABLE if differentiable else {})}

    def run_node(self, n: fx.Node) -> Any:
        """The node's value. fx.Interpreter would write the node into a global, which a compilation in another thread
        reads."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return getattr(self, n.op)(n.target, args, kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._calls.get(str(target), target)(*args, **kwargs)


# The options of Inductor's random operators concern its own layout of the numbers.
def _random(size: Sequence[int], seed: Tensor, mode: str, **options: Any) -> Tensor:
    make = {"rand": torch.rand, "randn": torch.randn}[mode]
    return make(list(size), generator=_generator(seed), device=seed.device)


def _randint(low: int, high: int, size: Sequence[int], seed: Tensor, **options: Any) -> Tensor:
    return torch.randint(low, high, list(size), generator=_generator(seed), device=seed.device)


def _pool_indices(offsets: Tensor, *options: Any) -> Tensor:
    """Block by block: PyTorch makes seven tensors of the indices' size, and all of that twice."""
    found = torch.empty_like(offsets, dtype=torch.int64)
    run = torch.ops.prims._low_memory_max_pool_offsets_to_indices.default
    # Rows or channels: an index is one of a plane.
    dim = 0 if len(offsets) > 1 else offsets.dim() - len(options[0]) - 1
    for made, given in zip(found.tensor_split(_BLOCKS, dim), offsets.tensor_split(_BLOCKS, dim), strict=True):
        made.copy_(run(given, *options))
    return found


def _generator(seed: Tensor) -> torch.Generator:
    return torch.Generator(seed.device).manual_seed(int(seed) % 2**63)


def _cudnn_batch_norm_backward(x: Tensor, grad: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """``rest`` are the running mean and variance, the batch's mean and deviation, epsilon, and what cuDNN reserved."""
    statistics, eps = rest[:4], rest[4]
    backward = _NORMALISATIONS["aten.native_batch_norm_backward.default"]
    found: tuple[Tensor, ...] = backward(grad, x, weight, *statistics, True, eps, [True] * 3)
    return found


_NORM_BACKWARDS = [
    aten.native_batch_norm_backward, aten.batch_norm_backward, aten.native_layer_norm_backward,
    aten.native_group_norm_backward, aten._fused_rms_norm_backward,
]  # fmt: skip
_NORMALISATIONS: dict[str, Callable[..., Any]] = {
    str(op): run for op, run in get_decompositions(_NORM_BACKWARDS).items()
}
# By name: Inductor registers its operators when it is first used.
_AS_INDUCTOR: dict[str, Callable[..., Any]] = {
    # Inductor lays tensors out as it likes, and copies where a view asks for another layout.
    "aten.view.default": torch.reshape,
    "aten._unsafe_view.default": torch.reshape,
    "prims.inductor_random.default": _random,
    "prims.inductor_randint.default": _randint,
    "prims._low_memory_max_pool_offsets_to_indices.default": _pool_indices,
    # As itself it makes the product first.
    "prims.fma.default": lambda a, b, c: torch.addcmul(c, a, b),
    # Operators run in the order in which they are written. What is behind itself is to be a copy (`keep_parts`).
    "gact_fx.behind.default": lambda blob, before: blob.clone() if before is blob else blob,
}
_DIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    **_NORMALISATIONS,
    "aten.cudnn_batch_norm_backward.default": _cudnn_batch_norm_backward,
    "aten.miopen_batch_norm_backward.default": _cudnn_batch_norm_backward,
    "aten.convolution_backward.default": differentiable_convolution_backward,
    "aten.mul.Tensor": differentiable_product,
    "prims.convert_element_type.default": Tensor.to,
    # Torch 2.11 has no derivative for it.
    "prims.fma.default": lambda a, b, c: a * b + c,
    # What an operator that writes in place has become; the values written alone matter.
    "aten.copy.default": lambda to, source, non_blocking=False: source.expand_as(to).to(to.dtype),
    # In a backward graph it is there for the bookkeeping of the first derivative.
    "aten.detach.default": lambda x: x,
    **{str(op): spelled_attention(op) for op in FUSED_ATTENTION.values()},
    **{str(op): spelled_attention_backward(op) for op in FUSED_ATTENTION},
    "gact_fx.recurrent_layer_backward.default": differentiable_backward,
}
