"""Tensors of every kind that the codec must take, for the tests of the CUDA kernels and of their emulation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

KINDS = ("normal", "offset", "relu", "constant", "minus_zero", "subnormal", "huge", "nan", "inf", "minus_inf", "all")


def inputs(groups: int, group_size: int, dtype: torch.dtype, seed: int, kinds: Sequence[str] = KINDS) -> torch.Tensor:
    """Return groups of elements, 1-D, the kind of each drawn from ``kinds``."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(groups, group_size, generator=generator, dtype=torch.float64)
    draw = torch.rand(groups, group_size, generator=generator, dtype=torch.float64)
    info = torch.finfo(dtype)
    nonfinite = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64)
    rare = draw < 0.1
    values = {
        "normal": normal,
        "offset": normal * 0.01 + 100.0,
        "relu": normal.relu(),
        "constant": torch.full_like(normal, -1.7),
        "minus_zero": torch.where(draw < 0.5, -0.0, 0.0),
        "subnormal": normal * info.smallest_normal * 0.1,
        "huge": info.max * normal.clamp(-1.0, 1.0),
        "nan": torch.where(rare, -math.nan, normal),
        "inf": torch.where(rare, math.inf, normal),
        "minus_inf": torch.where(rare, -math.inf, normal),
        "all": torch.where(draw < 0.5, nonfinite[(draw * 6).long().clamp(max=2)], normal),
    }
    chosen = torch.randint(len(kinds), (groups,), generator=generator)
    stacked = torch.stack([values[kind] for kind in kinds])
    return stacked[chosen, torch.arange(groups)].to(dtype).view(-1)
