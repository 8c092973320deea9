"""List the ways in which each saved tensor may be stored, with bytes and variance: the menus of `allocate_bits`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gact_fx.codec.layout import BFLOAT16_BITS, WIDTHS, blob_nbytes, step_variance
from gact_fx.passes.merge_masks import is_lossless
from gact_fx.planning.allocate_bits import Choice, Menu
from gact_fx.records import Code, Eligibility, SavedTensor, Sensitivity

# Least sensitivity per element, relative to the median. What moves little when it is measured, most of all at
# initialisation, may move much later: sensitivities of attention inputs were seen to grow a thousandfold in 200 steps.
FLOOR = 1e-2
EXACT_GROUP = 256


@dataclass(frozen=True)
class Item:
    """One tensor that wants a width, and what was measured about it (None: nothing)."""

    tensor: SavedTensor
    how: Eligibility
    sensitivity: Sensitivity | None


def list_choices(items: Sequence[Item], *, roundings: Sequence[str], group_sizes: Sequence[int]) -> list[Menu]:
    """A menu for every item, over ``roundings`` and ``group_sizes``.

    What was not measured is taken for as sensitive per element as the mean.
    """
    known = sorted(i.sensitivity.value / i.tensor.numel for i in items if _is_finite(i.sensitivity) and i.sensitivity)
    mean = sum(known) / len(known) if known and sum(known) > 0 else 1.0
    floor = FLOOR * (known[len(known) // 2] if known else mean) or FLOOR * mean
    return [_menu(item, mean, floor, roundings, group_sizes) for item in items]


def _menu(item: Item, mean: float, floor: float, roundings: Sequence[str], group_sizes: Sequence[int]) -> Menu:
    tensor, how = item.tensor, item.how
    assert tensor.dtype is not None
    measured = item.sensitivity if _is_finite(item.sensitivity) else None
    per_element = max(mean if measured is None else measured.value / tensor.numel, floor)
    choices = []
    for bits in (*WIDTHS, BFLOAT16_BITS):
        if bits < how.min_bits or (bits == BFLOAT16_BITS and tensor.dtype.itemsize != 4):
            continue
        for rounding in roundings if bits != BFLOAT16_BITS else _without_dither(roundings):
            for size in group_sizes:
                code = (bits, rounding, size)
                variance = _variance(code, measured, per_element * tensor.numel)
                nbytes = int(blob_nbytes(tensor.numel, tensor.dtype, bits, size, how.mask_numel))
                choices.append(Choice(bits, rounding, size, nbytes, variance))
                merged = _merged_variance(code, how, measured, per_element * tensor.numel)
                if merged is not None:
                    nbytes = int(blob_nbytes(tensor.numel, tensor.dtype, bits, size, how.mask_numel - tensor.numel))
                    choices.append(Choice(bits, rounding, size, nbytes, merged, merged=True))
    if how.exact_allowed:
        nbytes = tensor.nbytes if how.instead else tensor.storage_nbytes
        choices.append(Choice(None, "stochastic", EXACT_GROUP, nbytes, 0.0))
    return choices


def _merged_variance(code: Code, how: Eligibility, measured: Sensitivity | None, sensitivity: float) -> float | None:
    """As `_variance`, for codes that tell a mask as well; None where they cannot, or what they do is not known."""
    bits, rounding, size = code
    if not how.merges or not 2 <= bits <= WIDTHS[-1]:
        return None
    kind = "dither" if rounding == "dither" else "stochastic"
    if measured is not None and measured.value > 0 and (bits, kind, size) in measured.merged:
        return measured.merged[bits, kind, size] * max(sensitivity / measured.value, 1.0)
    if not is_lossless(how):
        return None
    return sensitivity * step_variance(bits, merged=True) * (0.5 if rounding == "dither" else 1.0)


def _variance(code: Code, measured: Sensitivity | None, sensitivity: float) -> float:
    """The variance of ``code``, scaled to ``sensitivity`` where that is more than was measured."""
    # Rounding to nearest is for debugging, and planned as if it were stochastic.
    bits, rounding, size = code
    code = (bits, "dither" if rounding == "dither" else "stochastic", size)
    if measured is None or measured.value <= 0 or code not in measured.variances:
        relative = 2.0**-16 if bits == BFLOAT16_BITS else step_variance(bits)
        return sensitivity * relative * (0.5 if rounding == "dither" else 1.0)
    return measured.variances[code] * max(sensitivity / measured.value, 1.0)


def _without_dither(roundings: Sequence[str]) -> list[str]:
    """bfloat16 codes know no dither."""
    return [rounding for rounding in roundings if rounding != "dither"] or ["stochastic"]


def _is_finite(sensitivity: Sensitivity | None) -> bool:
    if sensitivity is None:
        return False
    return all(v < float("inf") for v in (sensitivity.value, *sensitivity.variances.values()))
