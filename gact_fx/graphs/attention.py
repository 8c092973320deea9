"""Fused attention and its backward pass, spelled out so that autograd can differentiate them.

The scores of every head are far more than what they are made of, which is why attention is fused. Large ones are
therefore made a few heads or queries at a time, and again when autograd goes through them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gact_fx.graphs.operators import arguments_of, result_count

# Scores that are made together, of one query at least.
_MOST_NBYTES = 2**21
# The first query's position, and inputs -> results.
Run = Callable[..., tuple[Tensor, ...]]


def attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **options: Any
) -> tuple[Tensor, ...]:
    """Fused attention's output and logsumexp, without dropout (which the CPU's kernel does not have)."""
    key, value = (_for_every_head(x, query.shape[1]) for x in (key, value))
    mask, scale = _mask(query, key, options), _scale(query, options)
    pieces = _Pieces.of(query, key, inputs=(True, False, False, True), results=(True, True))
    return _in_pieces(partial(_attention, scale, is_causal), pieces, query, key, value, mask)


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
    pieces = _Pieces.of(query, key, inputs=(True, False, False, *[True] * 4), results=(True, False, False))
    run = partial(_backward, scale, is_causal)
    of_query, of_key, of_value = _in_pieces(run, pieces, query, key, value, mask, grad, output, logsumexp)
    return of_query, of_key.unflatten(1, (groups[0], -1)).sum(2), of_value.unflatten(1, (groups[1], -1)).sum(2)


def spelled_attention(target: Any) -> Callable[..., tuple[Any, ...]]:
    """One of PyTorch's operators of fused attention, ``target``, as `attention`; its other results are None."""

    def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = arguments_of(target, args, kwargs)
        inputs = (given["query"], given["key"], given["value"], 0.0, given["is_causal"])
        found = attention(*inputs, **_options(given))
        return (*found, *[None] * (result_count(target) - 2))

    return run


def spelled_attention_backward(target: Any) -> Callable[..., tuple[Any, ...]]:
    """The backward pass ``target`` of one of them, as `attention_backward`.

    A GPU's dropout is left out: its mask is nowhere but in the kernel. A mask that wants a gradient has it from
    ``target`` itself.
    """

    def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = arguments_of(target, args, kwargs)
        if given.get("grad_input_mask", [False])[-1]:
            result: tuple[Any, ...] = target(*args, **kwargs)
            return result
        query = given["query"]
        # cuDNN's has a dimension more, and that of memory-efficient attention is padded.
        logsumexp = given["logsumexp"].flatten(2)[..., : query.shape[2]]
        inputs = (args[0], query, given["key"], given["value"], given["out"], logsumexp, 0.0, given["is_causal"])
        return (*attention_backward(*inputs, **_options(given)), *[None] * (result_count(target) - 3))

    return run


def _options(given: dict[str, Any]) -> dict[str, Any]:
    return {"attn_mask": given.get("attn_bias", given.get("attn_mask")), "scale": given["scale"]}


def _attention(
    scale: float, is_causal: bool, first: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, mask, first if is_causal else None, scale)
    logsumexp = scores.logsumexp(-1)
    return (scores - logsumexp.unsqueeze(-1)).exp() @ value, logsumexp


def _backward(
    scale: float,
    is_causal: bool,
    first: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    grad: Tensor,
    output: Tensor,
    logsumexp: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (_scores(query, key, mask, first if is_causal else None, scale) - logsumexp.unsqueeze(-1)).exp()
    slope = weights * (grad @ value.mT - (grad * output).sum(-1, keepdim=True)) * scale
    return slope @ key, slope.mT @ query, weights.mT @ grad


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, first: int | None, scale: float) -> Tensor:
    """``first``: the position of the first query, whose future has no say; None where all keys have."""
    scores = query @ key.mT * scale
    if mask is not None:
        scores = scores + mask
    if first is not None:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1 + first)
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


@dataclass(frozen=True)
class _Pieces:
    """How many rows, heads and queries (dimensions 0 to 2) are computed at a time.

    ``inputs`` and ``results`` say which have queries; the others have keys, and gradients of these add up.
    """

    rows: int
    heads: int
    queries: int
    is_one: bool
    inputs: tuple[bool, ...]
    results: tuple[bool, ...]

    @classmethod
    def of(cls, query: Tensor, key: Tensor, inputs: tuple[bool, ...], results: tuple[bool, ...]) -> "_Pieces":
        rows, heads, queries, _ = query.shape
        most = max(_MOST_NBYTES // max(query.element_size() * key.shape[-2], 1), 1)
        of_head, of_row = most // max(queries, 1), most // max(queries * heads, 1)
        return cls(max(of_row, 1), max(of_head, 1), most, of_row >= rows, inputs, results)

    def each(self, run: Run, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        """``run`` on piece after piece; its results as of all at once."""
        rows = []
        for row in _split(inputs, self.rows, 0):
            heads = [self._each_query(run, head) for head in _split(row, self.heads, 1)]
            rows.append([torch.cat(parts, 1) for parts in zip(*heads, strict=True)])
        return [torch.cat(parts) for parts in zip(*rows, strict=True)]

    def _each_query(self, run: Run, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        found: list[list[Tensor]] = [[] for _ in self.results]
        first = 0
        for part in _split(inputs, self.queries, 2, self.inputs):
            for parts, has_queries, result in zip(found, self.results, run(first, *part), strict=True):
                if has_queries or not parts:
                    parts.append(result)
                else:
                    parts[0] = parts[0] + result
            first += self.queries
        return [torch.cat(parts, 2) for parts in found]


def _in_pieces(run: Run, pieces: _Pieces, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    if pieces.is_one:
        return run(0, *inputs)
    found: tuple[Tensor, ...] = _InPieces.apply(run, pieces, *inputs)  # type: ignore[no-untyped-call]
    return found


class _InPieces(torch.autograd.Function):
    """Piece after piece, of which nothing is kept for autograd but what they are made of."""

    @staticmethod
    def forward(ctx: Any, run: Run, pieces: _Pieces, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        # Not by save_for_backward, whose hooks would round them: the scores are exponentiated.
        ctx.run, ctx.pieces, ctx.inputs = run, pieces, [None if x is None else x.detach() for x in inputs]
        return tuple(pieces.each(run, inputs))

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [at for at, needs in enumerate(ctx.needs_input_grad[2:]) if needs]
        pieces: _Pieces = ctx.pieces

        def differentiate(first: int, *parts: Tensor | None) -> tuple[Tensor, ...]:
            inputs, along = parts[: len(ctx.inputs)], parts[len(ctx.inputs) :]
            with torch.enable_grad():
                begun: list[Any] = [
                    None if x is None else x.detach().requires_grad_(at in wanted) for at, x in enumerate(inputs)
                ]
                results = ctx.run(first, *begun)
            used = [(result, slope) for result, slope in zip(results, along, strict=True) if result.requires_grad]
            return torch.autograd.grad(
                [result for result, _ in used], [begun[at] for at in wanted], [slope for _, slope in used],
                allow_unused=True, materialize_grads=True,
            )  # fmt: skip

        of_wanted = tuple(pieces.inputs[at] for at in wanted)
        backward = replace(pieces, inputs=pieces.inputs + pieces.results, results=of_wanted)
        found = dict(zip(wanted, backward.each(differentiate, [*ctx.inputs, *slopes]), strict=True))
        return None, None, *(found.get(at) for at in range(len(ctx.inputs)))


def _split(
    inputs: Sequence[Tensor | None], size: int, dim: int, is_split: Sequence[bool] = ()
) -> Iterator[tuple[Tensor | None, ...]]:
    """Pieces of the ``inputs`` that are to be split, which is the default, beside the whole others."""
    pairs = list(zip(inputs, is_split or [True] * len(inputs), strict=True))
    count = next(x.shape[dim] for x, splits in pairs if x is not None and splits)
    for start in range(0, count, size):
        length = min(size, count - start)
        yield tuple(x.narrow(dim, start, length) if x is not None and splits else x for x, splits in pairs)
