"""A code: how a tensor's elements become numbers of a few bits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gact_fx.codec.by_place import mean_bits
from gact_fx.codec.layout import BFLOAT16_BITS, blob_nbytes, rounding_of

# Widths of a code on a grid; 16 bits are bfloat16.
WIDTHS = tuple(range(1, 9))
LEAST_GROUP = 32
# What codes of rotated groups add, over the variance of a group's elements: D / (1 - D), where D is the least error of
# so many bits for a normal distribution (Max, 1960; Vargaftik et al., "EDEN", ICML 2022, theorem 2.3).
ROTATED_VARIANCES = {1: 0.5708, 2: 0.1331, 3: 0.03578, 4: 0.009592}
# The squared range of so many normal numbers as a group has by default, over their variance.
_SQUARED_RANGE = 31.0


@dataclass(frozen=True)
class Code:
    """The width of a code in bits, its rounding, how many elements share a minimum and a step, and the noise's seed.

    ``by_place``: the widths of the groups of a row, as "8 2x15", the least of which is ``bits``; '' where all groups
    have ``bits``. Everything but the bits is without meaning for masks and integers, which are packed exactly.
    `compress` of `gact_fx.ops` says more.

    ``per_channel``: groups lie within a channel, the dimension that is the fastest in memory, along all others. A few
    channels that stick out, as trained transformers have them, then widen the range of no other (Liu et al., "KIVI",
    ICML 2024, for keys).
    """

    bits: int
    rounding: str = "stochastic"
    group_size: int = 256
    seed: int = 0
    by_place: str = ""
    per_channel: bool = False

    @property
    def mean_bits(self) -> float:
        """Bits of a code, in the mean over places."""
        return mean_bits(self.by_place) if self.by_place else self.bits

    def order_of(self, memory: Sequence[int]) -> tuple[int, ...]:
        """The order in which dimensions are coded, slowest first, that lie in memory in the order of ``memory``."""
        return (memory[-1], *memory[:-1]) if self.per_channel and memory else tuple(memory)

    def within(self, length: int) -> "Code":
        """The code with groups of no more elements than a channel of ``length`` has, if they lie within channels."""
        if not self.per_channel or self.group_size <= length:
            return self
        return replace(self, group_size=max(2 ** (length.bit_length() - 1) if length else 0, LEAST_GROUP))

    def nbytes(self, numel: int, dtype: torch.dtype, mask_numel: int = 0) -> int:
        """Bytes of the blob for ``numel`` elements, with a mask of ``mask_numel`` behind them."""
        return int(blob_nbytes(numel, dtype, self.bits, self.group_size, mask_numel, self.by_place))

    def to_compress(self, mask: Any = None) -> tuple[Any, ...]:
        """The arguments of ``gact_fx::compress`` behind the tensor."""
        return self.bits, self.group_size, self.seed, mask, self.rounding, *self._places()

    def to_decompress(self) -> tuple[Any, ...]:
        """The arguments of ``gact_fx::decompress`` behind the dtype."""
        return self.bits, self.group_size, self.seed, self.rounding, *self._places()

    def _places(self) -> tuple[str, ...]:
        return (self.by_place,) if self.by_place else ()

    @classmethod
    def of_compress(cls, args: Sequence[Any]) -> "Code":
        """The code that a call of ``gact_fx::compress`` writes, from all its arguments."""
        bits, group_size, seed = args[1:4]
        return cls(bits, args[5] if len(args) > 5 else "stochastic", group_size, seed, *args[6:])

    @classmethod
    def of_decompress(cls, args: Sequence[Any]) -> "Code":
        """The code that a call of ``gact_fx::decompress`` reads, from all its arguments."""
        given: list[Any] = [*args[3:], *[0, "stochastic", ""][len(args) - 5 :]]
        bits, group_size, seed, rounding, by_place = given
        return cls(bits, rounding, group_size, seed, by_place)


# Of a mask; integers have more bits.
MASK_CODE = Code(1)


def step_variance(bits: float, *, merged: bool = False) -> float:
    """S(b) = 1 / (2^b - 1)^2: the variance of b-bit codes relative to the squared range (GACT, equation 4).

    With ``merged``, one of the codes is for what a mask stops.
    """
    levels = float(2**bits) - 1 - merged
    return 1.0 / levels**2


def relative_variance(code: Code, *, merged: bool = False) -> float:
    """The variance of codes relative to the squared range, where nothing is known of the values: dither has half.

    Stochastic rounding adds a sixth of the squared step in the mean, which is the unit.
    """
    if code.bits == BFLOAT16_BITS:
        return 2.0**-16
    if rounding_of(code.rounding, code.bits) == "rotated":
        return 6 / _SQUARED_RANGE * ROTATED_VARIANCES[code.bits]
    return step_variance(code.mean_bits, merged=merged) * (1.0 if code.rounding in ("stochastic", "nearest") else 0.5)
