"""Arithmetic on gradients, which may be complex or sparse, and may have overflowed, without copies as large as they."""

import math
from collections.abc import Iterable

import torch

# Elements that are brought to double precision at a time: a step ends with them, where all gradients are in memory.
_CHUNK = 2**17
# A prime: what repeats along a gradient (the rows of a matrix) falls into other numbers each time.
_NUMBERS = 4093


def are_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Whether all of them are free of NaN and infinity."""
    # Sparse gradients have no isfinite.
    return all(math.isfinite(squared_norm(gradient)) for gradient in gradients)


def in_double(gradient: torch.Tensor) -> torch.Tensor:
    """``gradient`` in double precision, complex where it is complex."""
    return gradient.to(torch.complex128 if gradient.is_complex() else torch.float64)


def squared_norm(gradient: torch.Tensor) -> float:
    """The sum of the elements' squared magnitudes."""
    return float(sum(part.double().square().sum() for part in _reals(gradient).split(_CHUNK)))


def sketch(gradient: torch.Tensor) -> torch.Tensor:
    """At most 4,093 numbers, linear in the gradient, whose norm is the gradient's.

    Of gradients with more elements it is so in the mean over the random signs, and within two percent: what differs
    between two sketches of one leaf's gradients is the sketch of the difference. That is the count sketch (Charikar,
    Chen and Farach-Colton, 2002) with consecutive elements in different numbers.

    Returns:
        Double precision, the same for the same gradient whenever it is asked for.
    """
    numbers = _reals(gradient)
    if numbers.numel() <= _NUMBERS:
        return numbers.to(torch.float64, copy=True)
    total = torch.zeros(_NUMBERS, dtype=torch.float64, device=gradient.device)
    generator = torch.Generator(gradient.device).manual_seed(0)
    for part in numbers.split(_NUMBERS * (_CHUNK // _NUMBERS)):
        signs = torch.empty_like(part, dtype=torch.int8).random_(0, 2, generator=generator).mul_(2).sub_(1)
        signed = part.double() * signs
        whole = signed.numel() - signed.numel() % _NUMBERS
        total += signed[:whole].view(-1, _NUMBERS).sum(0)
        total[: signed.numel() - whole] += signed[whole:]
    return total


def _reals(gradient: torch.Tensor) -> torch.Tensor:
    """The elements in one dimension, of complex ones real and imaginary parts."""
    dense = gradient.detach() if gradient.layout is torch.strided else gradient.detach().to_dense()
    # Numbers that carry a pending conjugation cannot be viewed as real ones.
    return (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).reshape(-1)
