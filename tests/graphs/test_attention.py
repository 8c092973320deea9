"""Attention that is spelled out has PyTorch's values and derivatives, and the scores of few heads in memory."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peak_bytes import peak_bytes

from gact_fx.graphs import attention as spelled

ROWS, HEADS, QUERIES, KEYS, WIDTH = 3, 4, 10, 12, 8


def inputs(groups: int = HEADS, *, mask: str = "none") -> tuple[list[torch.Tensor], torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(ROWS, heads, tokens, WIDTH, generator=generator, dtype=torch.float64)

    masks = {"none": None, "shared": torch.randn(1, 1, QUERIES, KEYS, generator=generator, dtype=torch.float64)}
    masks["by row"] = torch.randn(ROWS, 1, 1, KEYS, generator=generator, dtype=torch.float64)
    return [draw(HEADS, QUERIES), draw(groups, KEYS), draw(groups, KEYS)], masks[mask]


@pytest.fixture(
    params=[1, 3 * KEYS * 8, 3 * QUERIES * KEYS * 8, 9 * QUERIES * KEYS * 8, 2**30],
    ids=["query", "queries", "3", "9", "all"],
)
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of so much at a time: one query, three, three of the four heads of a row, two rows, all."""
    monkeypatch.setattr(spelled, "_MOST_NBYTES", request.param)


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize(("mask", "is_causal"), [("none", False), ("none", True), ("shared", False), ("by row", False)])
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_agrees_with_pytorch(mask: str, is_causal: bool, groups: int) -> None:
    (query, key, value), bias = inputs(groups, mask=mask)
    leaves = [x.requires_grad_() for x in (query, key, value)] + ([] if bias is None else [bias.requires_grad_()])
    options: dict[str, Any] = {"attn_mask": bias, "scale": 0.3}
    output, logsumexp = spelled.attention(query, key, value, 0.0, is_causal, **options)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(
            query, key, value, bias, is_causal=is_causal, scale=0.3, enable_gqa=groups != HEADS
        )
    torch.testing.assert_close(output, expected)
    grad = torch.randn_like(output)
    found = torch.autograd.grad(output, leaves, grad, retain_graph=True)
    first = torch.autograd.grad(expected, leaves, grad, create_graph=True)
    torch.testing.assert_close(found, first)
    gradients = spelled.attention_backward(
        grad, query, key, value, output.detach(), logsumexp.detach(), 0.0, is_causal, **options
    )
    torch.testing.assert_close(gradients, first[:3])


@pytest.mark.usefixtures("together")
def test_the_gradient_is_differentiated_whole() -> None:
    """Along the gradients of query, key and value: by the mask, the arriving gradient, and what forward gave, too."""
    (query, key, value), bias = inputs(mask="by row")
    assert bias is not None
    with torch.no_grad():
        output, logsumexp = spelled.attention(query, key, value, attn_mask=bias)
    leaves = [
        x.clone().requires_grad_() for x in (torch.randn_like(output), query, key, value, output, logsumexp, bias)
    ]

    def backward(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grad, query, key, value, output, logsumexp, bias = given
        return spelled.attention_backward(grad, query, key, value, output, logsumexp, 0.0, False, attn_mask=bias)

    assert torch.autograd.gradcheck(backward, leaves, fast_mode=True)


def test_few_scores_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, rows, heads = 256, 4, 4
    scores = tokens * tokens * 4
    monkeypatch.setattr(spelled, "_MOST_NBYTES", scores)
    query, key, value = (torch.randn(rows, heads, tokens, 8).requires_grad_() for _ in range(3))
    with torch.no_grad():
        output, logsumexp = spelled.attention(query, key, value)
    grad = torch.randn_like(output)

    def differentiate() -> torch.Tensor:
        parts = spelled.attention_backward(grad, query, key, value, output, logsumexp, 0.0, False)
        return torch.stack([part.square().sum() for part in parts]).sum()

    assert peak_bytes(differentiate).step < 16 * scores, "as many as there are heads, once"
    assert query.grad is not None and bool(query.grad.isfinite().all())
