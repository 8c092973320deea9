"""A GPU's operators of fused attention, on the CPU: what graphs with them make of a model can be tested without a GPU.

`registered` gives PyTorch's operators kernels for the CPU, in plain PyTorch. Dropout is drawn from a seed, as on a GPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
PADDING = 32  # the logsumexp of memory-efficient attention has a multiple of so many rows


def _weights(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    scores = query.float() @ key.float().mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores


def _dropped(weights: Tensor, rate: float, seed: Tensor) -> Tensor:
    if not rate:
        return weights
    generator = torch.Generator().manual_seed(int(seed.view(torch.int64).flatten()[0]))
    return weights * (torch.rand(weights.shape, generator=generator) >= rate) / (1 - rate)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, rate: float, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _weights(query, key, bias, is_causal, scale)
    logsumexp, seed = scores.logsumexp(-1), torch.zeros(2, dtype=torch.int64)
    if rate:
        seed = torch.randint(2**40, (2,))
    weights = _dropped((scores - logsumexp.unsqueeze(-1)).exp(), rate, seed)
    return (weights @ value.float()).to(query.dtype), logsumexp, seed


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor, logsumexp: Tensor,
    seed: Tensor, rate: float, is_causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    weights = (_weights(query, key, bias, is_causal, scale) - logsumexp.unsqueeze(-1)).exp()
    of_value = _dropped(weights, rate, seed).mT @ grad.float()
    of_weights = _dropped(grad.float() @ value.float().mT, rate, seed)
    slope = weights * (of_weights - (grad * out).float().sum(-1, keepdim=True))
    slope = slope * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    found = (slope @ key.float(), slope.mT @ query.float(), of_value)
    # Each lies in memory as what it is the gradient of.
    of_query, of_key, of_value = (torch.empty_like(x).copy_(g) for x, g in zip((query, key, value), found, strict=True))
    return of_query, of_key, of_value


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    out, logsumexp, seed = _forward(query, key, value, None, dropout_p, is_causal, scale)
    # In memory heads lie as those of the query do.
    out, sizes = torch.empty_like(query).copy_(out), (query.shape[2], key.shape[2])
    return (
        out,
        logsumexp,
        None,
        None,
        *sizes,
        seed.view(torch.uint64),
        seed[1].clone().view(torch.uint64),
        query.new_empty(0),
    )


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Any,
    cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, seed: Tensor, offset: Tensor, *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _backward(grad, query, key, value, None, out, logsumexp, seed, dropout_p, is_causal, scale)


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    out, logsumexp, seed = _forward(query, key, value, attn_bias, dropout_p, is_causal, scale)
    # Heads lie side by side, as the kernel writes them.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, F.pad(logsumexp, (0, -logsumexp.shape[-1] % PADDING), value=math.inf), seed[0].clone(), seed[1].clone()


def _efficient_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, out: Tensor, logsumexp: Tensor,
    seed: Tensor, offset: Tensor, dropout_p: float, grad_input_mask: list[bool], is_causal: bool = False, *,
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    rows = logsumexp[..., : query.shape[2]]
    found = _backward(grad, query, key, value, attn_bias, out, rows, seed, dropout_p, is_causal, scale)
    return *found, None


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """The operators have kernels for the CPU within."""
    library = torch.library.Library("aten", "IMPL")
    kernels = {
        "_scaled_dot_product_flash_attention": _flash,
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_efficient_attention": _efficient,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    }
    for name, kernel in kernels.items():
        library.impl(name, kernel, "CPU")
    try:
        yield
    finally:
        library._destroy()


def attend(kind: str, query: Tensor, key: Tensor, value: Tensor, rate: float = 0.0, is_causal: bool = False) -> Tensor:
    """Attention by one of the operators: "flash", "efficient", or "masked" (efficient, without the last key)."""
    if kind == "flash":
        result: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, rate, is_causal)[0]
        return result
    bias = None
    if kind == "masked":
        bias = query.new_zeros(key.shape[2])
        bias[-1] = -math.inf
        bias = bias.expand(*query.shape[:-1], -1)
    result = aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, rate, is_causal)[0]
    return result
