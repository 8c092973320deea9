"""Linear layer and cross-entropy in slabs, against PyTorch's own on whole logits."""

from typing import Any

import pytest
import torch
from peak_bytes import peak_bytes
from torch.nn import functional as F

from gact_fx.graphs import linear_cross_entropy as module

operator = torch.ops.gact_fx.linear_cross_entropy.default
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several, the last one smaller."""
    monkeypatch.setattr(module, "SLAB", 2**12)


def inputs(dtype: torch.dtype, has_bias: bool, has_weights: bool) -> tuple[Any, ...]:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, 16, dtype=dtype, requires_grad=True) for rows in (50, 1000))
    bias = torch.randn(1000, dtype=dtype, requires_grad=True) if has_bias else None
    class_weight = torch.rand(1000, dtype=torch.promote_types(dtype, torch.float32)) if has_weights else None
    target = torch.randint(0, 1000, (50,))
    target[::7] = -100
    return hidden, weight, bias, target, class_weight


def whole_logits(*given: Any, scale: float = 1.0, cap: float = 0.0) -> torch.Tensor:
    logits = F.linear(*given)
    logits = scale * logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cap * torch.tanh(logits) if cap else logits


def on_whole_logits(*given: Any, smoothing: float = 0.0, **scaling: float) -> Any:
    hidden, weight, bias, target, class_weight = (*given, None)[:5]
    logits = whole_logits(hidden, weight, bias, **scaling)
    loss = F.cross_entropy(logits, target, class_weight, reduction="none", label_smoothing=smoothing)
    return loss, logits.logsumexp(1)


def differentiated(results: Any, leaves: Any) -> list[torch.Tensor]:
    """Loss, logarithms, and the gradients of something that reads both, by rows that count differently."""
    loss, lse = results
    rows = torch.linspace(-1, 2, len(loss), dtype=loss.dtype)
    total = (loss * rows).sum() + 0.01 * (lse * lse).sum()
    return [loss.detach(), lse.detach(), *torch.autograd.grad(total, [x for x in leaves if x is not None])]


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_loss_and_gradients_are_those_of_whole_logits(
    dtype: torch.dtype, has_bias: bool, smoothing: float, has_weights: bool
) -> None:
    given = inputs(dtype, has_bias, has_weights)
    exact = differentiated(on_whole_logits(*given, smoothing=smoothing), given[:3])
    with torch.no_grad():
        logits = F.linear(*given[:3])
    for known in (None, logits):
        found = differentiated(operator(*given, known, -100, smoothing), given[:3])
        for a, b in zip(found, exact, strict=True):
            assert a.dtype == b.dtype and float((a - b).norm()) <= TOLERANCE[dtype] * float(b.norm())


@pytest.mark.parametrize("scaling", [(0.25, 0.0), (0.25, 2.0), (-3.0, -0.5)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_logits_may_be_scaled_and_capped(dtype: torch.dtype, scaling: tuple[float, float]) -> None:
    given, names = inputs(dtype, True, True), ("scale", "cap")
    named = dict(zip(names, scaling, strict=True))
    exact = differentiated(on_whole_logits(*given, smoothing=0.1, **named), given[:3])
    with torch.no_grad():
        logits = whole_logits(*given[:3], **named)
    for known in (None, logits):
        found = differentiated(operator(*given, known, -100, 0.1, *scaling), given[:3])
        for a, b in zip(found, exact, strict=True):
            assert a.dtype == b.dtype and float((a - b).norm()) <= TOLERANCE[dtype] * float(b.norm())


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_wider_weight_is_rounded_as_autocast_does(has_bias: bool) -> None:
    hidden, weight, bias, target, _ = inputs(torch.float32, has_bias, False)
    hidden = hidden.detach().bfloat16().requires_grad_()
    rounded = [None if x is None else x.bfloat16() for x in (weight, bias)]
    leaves = hidden, weight, bias
    exact = differentiated(on_whole_logits(hidden, *rounded, target), leaves)
    found = differentiated(operator(hidden, weight, bias, target, None, None, -100, 0.0), leaves)
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == b.dtype and float((a - b).norm()) <= TOLERANCE[torch.bfloat16] * float(b.norm())


def test_of_a_wider_weight_no_copy_is_there_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLAB", 2**15)
    hidden = torch.randn(128, 256, dtype=torch.bfloat16, requires_grad=True)
    weight, target = torch.randn(8192, 256, requires_grad=True), torch.randint(0, 8192, (128,))
    found = peak_bytes(lambda: operator(hidden, weight, None, target, None, None, -100, 0.0)[0].mean())
    # Beside its gradient.
    assert found.step < 1.25 * weight.nbytes


def test_only_what_is_asked_for_is_computed() -> None:
    hidden, weight, bias, target, _ = inputs(torch.float32, True, False)
    loss, _ = operator(hidden, weight.detach(), bias, target, None, None, -100, 0.0)
    exact = F.cross_entropy(F.linear(hidden, weight, bias), target, reduction="sum")
    for a, b in zip(*(torch.autograd.grad(x, [hidden, bias]) for x in (loss.sum(), exact)), strict=True):
        torch.testing.assert_close(a, b)


def test_rows_that_do_not_count_and_logits_that_are_infinite() -> None:
    hidden, weight, _, target, _ = inputs(torch.float32, False, False)
    bias = torch.zeros(1000)
    bias[500:] = -torch.inf
    target = torch.where(target >= 500, -100, target)
    found = differentiated(operator(hidden, weight, bias, target, None, None, -100, 0.0), (hidden, weight))
    exact = differentiated(on_whole_logits(hidden, weight, bias, target), (hidden, weight))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_targets_of_few_bits() -> None:
    hidden, weight, _, target, _ = inputs(torch.float32, False, False)
    target = target.clamp(0, 255)
    exact, found = (operator(hidden, weight, None, t, None, None, -100, 0.0)[0] for t in (target, target.byte()))
    assert found.equal(exact)


@pytest.mark.parametrize("wrong", [1000, -1])
def test_a_target_out_of_bounds_is_an_error(wrong: int) -> None:
    hidden, weight, _, target, _ = inputs(torch.float32, False, False)
    target[3] = wrong
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
        operator(hidden, weight, None, target, None, None, -100, 0.0)


def test_the_schema_and_the_fakes() -> None:
    hidden, weight, bias, target, class_weight = inputs(torch.float32, True, True)
    torch.library.opcheck(operator, (hidden, weight, bias, target, class_weight, None, -100, 0.1))
    torch.library.opcheck(operator, (hidden, weight, bias, target, class_weight, None, -100, 0.1, 0.5, 2.0))
    backward = torch.ops.gact_fx.linear_cross_entropy_backward.default
    rows, lse = (x.detach() for x in operator(hidden, weight, bias, target, None, None, -100, 0.1))
    tensors = [x.detach() for x in (hidden, weight, bias)]
    for mask in ([True, True, True], [True, False, False]):
        for narrow in (tensors[0], tensors[0].bfloat16()):
            torch.library.opcheck(backward, (rows, lse, narrow, *tensors[1:], target, None, lse, -100, 0.1, mask))


def test_logits_are_never_there_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLAB", 2**18)
    hidden, weight = torch.randn(1024, 8, requires_grad=True), torch.randn(8192, 8, requires_grad=True)
    target = torch.randint(0, 8192, (1024,))
    whole = 1024 * 8192 * 4
    found = peak_bytes(lambda: operator(hidden, weight, None, target, None, None, -100, 0.0)[0].mean())
    assert found.step < whole / 4
    exact = peak_bytes(lambda: F.cross_entropy(F.linear(hidden, weight), target))
    assert exact.step > whole
