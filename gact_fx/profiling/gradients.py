"""Arithmetic on gradients, which may be complex or sparse, and may have overflowed."""

import math
from collections.abc import Iterable

import torch


def are_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Whether all of them are free of NaN and infinity."""
    # Sparse gradients have no isfinite.
    return all(math.isfinite(squared_norm(gradient)) for gradient in gradients)


def in_double(gradient: torch.Tensor) -> torch.Tensor:
    """``gradient`` in double precision, complex where it is complex."""
    return gradient.to(torch.complex128 if gradient.is_complex() else torch.float64)


def squared_norm(gradient: torch.Tensor) -> float:
    """The sum of the elements' squared magnitudes."""
    return float(in_double(gradient).abs().square().sum())
