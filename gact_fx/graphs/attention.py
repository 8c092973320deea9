"""Fused attention and its backward pass, spelled out so that autograd can differentiate them.

The scores of every head are far more than what they are made of, which is why attention is fused. Large ones are
therefore made a few heads at a time, and again when autograd goes through them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

# Scores that are made together, of one head at least.
_MOST_NBYTES = 2**23
ByHead = Callable[..., tuple[Tensor, ...]]


def attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **options: Any
) -> tuple[Tensor, ...]:
    """Fused attention's output and logsumexp, without dropout (which the CPU's kernel does not have)."""
    key, value = (_for_every_head(x, query.shape[1]) for x in (key, value))
    mask, scale = _mask(query, key, options), _scale(query, options)
    return _by_heads(partial(_attention, scale, is_causal), [query, key, value, mask], key.shape[-2])


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    **options: Any,
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value (FlashAttention, Dao et al. 2022, algorithm 4, without its tiles)."""
    groups = key.shape[1], value.shape[1]
    key, value = (_for_every_head(x, query.shape[1]) for x in (key, value))
    mask, scale = _mask(query, key, options), _scale(query, options)
    inputs = [query, key, value, mask, grad, output, logsumexp]
    of_query, of_key, of_value = _by_heads(partial(_backward, scale, is_causal), inputs, key.shape[-2])
    return of_query, of_key.unflatten(1, (groups[0], -1)).sum(2), of_value.unflatten(1, (groups[1], -1)).sum(2)


def _attention(
    scale: float, is_causal: bool, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, mask, is_causal, scale)
    logsumexp = scores.logsumexp(-1)
    return (scores - logsumexp.unsqueeze(-1)).exp() @ value, logsumexp


def _backward(
    scale: float,
    is_causal: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    grad: Tensor,
    output: Tensor,
    logsumexp: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (_scores(query, key, mask, is_causal, scale) - logsumexp.unsqueeze(-1)).exp()
    slope = weights * (grad @ value.mT - (grad * output).sum(-1, keepdim=True)) * scale
    return slope @ key, slope.mT @ query, weights.mT @ grad


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    scores = query @ key.mT * scale
    if mask is not None:
        scores = scores + mask
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores


def _for_every_head(x: Tensor, heads: int) -> Tensor:
    """Keys or values that groups of query heads share (grouped-query attention), repeated for each of these."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _mask(query: Tensor, key: Tensor, options: dict[str, Any]) -> Tensor | None:
    mask = options.get("attn_mask")
    return None if mask is None else mask.expand(*query.shape[:-1], key.shape[-2])


def _scale(query: Tensor, options: dict[str, Any]) -> float:
    scale = options.get("scale")
    return 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)


def _by_heads(run: ByHead, inputs: Sequence[Tensor | None], keys: int) -> tuple[Tensor, ...]:
    """``run`` on all heads of all rows (dimensions 0 and 1 of the ``inputs``), or on as many as may be at a time."""
    query = inputs[0]
    assert query is not None
    rows, heads, queries, _ = query.shape
    together = max(_MOST_NBYTES // max(query.element_size() * queries * keys, 1), 1)
    if together >= rows * heads:
        return run(*inputs)
    sizes = max(together // heads, 1), min(together, heads)
    found: tuple[Tensor, ...] = _ByHeads.apply(run, sizes, *inputs)  # type: ignore[no-untyped-call]
    return found


class _ByHeads(torch.autograd.Function):
    """So many rows and heads at a time, of which nothing is kept for autograd but what they are made of."""

    @staticmethod
    def forward(ctx: Any, run: ByHead, sizes: tuple[int, int], *inputs: Tensor | None) -> tuple[Tensor, ...]:
        # Not by save_for_backward, whose hooks would round them: the scores are exponentiated.
        ctx.run, ctx.sizes, ctx.inputs = run, sizes, [None if x is None else x.detach() for x in inputs]
        return tuple(_each(run, sizes, inputs))

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [at for at, needs in enumerate(ctx.needs_input_grad[2:]) if needs]

        def differentiate(*parts: Tensor | None) -> tuple[Tensor, ...]:
            inputs, along = parts[: len(ctx.inputs)], parts[len(ctx.inputs) :]
            with torch.enable_grad():
                begun: list[Any] = [
                    None if x is None else x.detach().requires_grad_(at in wanted) for at, x in enumerate(inputs)
                ]
                results = ctx.run(*begun)
            used = [(result, slope) for result, slope in zip(results, along, strict=True) if result.requires_grad]
            return torch.autograd.grad(
                [result for result, _ in used], [begun[at] for at in wanted], [slope for _, slope in used],
                allow_unused=True, materialize_grads=True,
            )  # fmt: skip

        found = dict(zip(wanted, _each(differentiate, ctx.sizes, [*ctx.inputs, *slopes]), strict=True))
        return None, None, *(found.get(at) for at in range(len(ctx.inputs)))


def _each(run: ByHead, sizes: tuple[int, int], inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """``run`` on so many rows and heads of the ``inputs`` at a time; its results as of all at once."""
    rows = []
    for row in _split(inputs, sizes[0], 0):
        heads = [run(*part) for part in _split(row, sizes[1], 1)]
        rows.append([torch.cat(parts, 1) for parts in zip(*heads, strict=True)])
    return [torch.cat(parts) for parts in zip(*rows, strict=True)]


def _split(inputs: Sequence[Tensor | None], size: int, dim: int) -> Iterator[tuple[Tensor | None, ...]]:
    count = next(x.shape[dim] for x in inputs if x is not None)
    for start in range(0, count, size):
        yield tuple(None if x is None else x.narrow(dim, start, min(size, count - start)) for x in inputs)
