"""``gact_fx::draw_mask``: which elements dropout keeps, by the numbers that Inductor would draw for them.

On the CPU, Inductor draws one number after another, about 15 ns each, and backward draws those of forward again from
their seed. The library's kernel draws eight or sixteen at a time.

Element i gets the first of the four words of Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as
1, 2, 3", SC 2011) with the counter (i, 0, 0, 0) and the key (seed, 0), all modulo 2^32; its low 31 bits, over 2^31,
are a number in [0, 1).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_KEYS, _FACTORS, _ROUNDS = (0x9E3779B9, 0xBB67AE85), (0xD2511F53, 0xCD9E8D57), 10
_LOW = 0xFFFFFFFF
_SCALE = 4.6566127342e-10  # the float32 below 2^-31

_library = torch.library.Library("gact_fx", "FRAGMENT")
_library.define(
    "draw_mask(Tensor seed, SymInt[] size, float threshold) -> Tensor",
    tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag),
)


def draw_mask(seed: Tensor, size: Sequence[int], threshold: float) -> Tensor:
    """Whether each element's number is greater than ``threshold``, in float32: bool of ``size``, in row-major order.

    ``seed``: one int64, of which the low 32 bits count.
    """
    counters = torch.arange(torch.Size(size).numel(), device=seed.device) & _LOW
    words = [counters, *(torch.zeros_like(counters) for _ in range(3))]
    keys = [seed.reshape(()) & _LOW, torch.zeros_like(seed.reshape(()))]
    for _ in range(_ROUNDS):
        (low_a, high_a), (low_b, high_b) = (_product(words[2 * i], factor) for i, factor in enumerate(_FACTORS))
        words = [high_b ^ words[1] ^ keys[0], low_b, high_a ^ words[3] ^ keys[1], low_a]
        keys = [(key + step) & _LOW for key, step in zip(keys, _KEYS, strict=True)]
    numbers = (words[0] & 0x7FFFFFFF).float() * _SCALE
    return (numbers > threshold).reshape(size)


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The low and the high word of the product of two words, none of which int64 could hold as a whole."""
    part = (x >> 16) * factor
    low = (x & 0xFFFF) * factor + ((part & 0xFFFF) << 16)
    return low & _LOW, ((part >> 16) + (low >> 32)) & _LOW


def _fake(seed: Tensor, size: Sequence[int], threshold: float) -> Tensor:
    return seed.new_empty(size, dtype=torch.bool)


_library.impl("draw_mask", draw_mask, "CompositeExplicitAutograd")
torch.library.register_fake("gact_fx::draw_mask", _fake, lib=_library)
