"""List the ways in which each saved tensor may be stored, with bytes and variance: the menus of `allocate_bits`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gact_fx.codec.by_place import runs_of
from gact_fx.codec.code import WIDTHS, Code, relative_variance
from gact_fx.codec.layout import BFLOAT16_BITS, rounding_of
from gact_fx.passes.encodings import Quantize
from gact_fx.patterns import list_patterns
from gact_fx.plan import TensorPlan
from gact_fx.planning.allocate_bits import Choice, Menu
from gact_fx.records import SavedTensor, Sensitivity

# Least sensitivity per element, relative to the median. What moves little when it is measured, most of all at
# initialisation, may move much later: sensitivities of attention inputs were seen to grow a thousandfold in 200 steps.
FLOOR = 1e-2
# What a squared bias counts beside a variance: averages over steps, momentum's over ten or so, leave it as it is.
BIAS_WEIGHT = 10.0
# Query and key of attention that backward computes again bend what it differentiates, more as training sharpens scores,
# and first order says nothing of that. Codes of 4 bits are taken to bias the gradient by such a share of its norm, and
# four times less with every bit more: five times what was found of a pretrained MiniLM (a GPT whose scores were three
# times sharper than at initialisation had 0.12). Where the norm is not known, so many bits are the least.
CURVED_BIAS, CURVED_AT, CURVED_BITS = 0.01, 4, 6
# The elements of a channel lie apart, so that codes of groups within channels take a few per cent of a layer's time.
# They are for widths whose steps are as large as values, and must add so many times what codes of neighbours do.
NARROW_BITS, WORTH_MOVING = 2, 0.5
# So many groups a channel are enough where they end elsewhere than channels do.
MANY_GROUPS = 8
# Exact bits an element beyond which a tensor is kept, where nothing else can be stored in its place.
MOST_MASK_BITS = 4


@dataclass(frozen=True)
class Item:
    """One tensor that wants a width, and what was measured about it (None: nothing)."""

    tensor: SavedTensor
    how: Quantize
    sensitivity: Sensitivity | None


def list_choices(
    items: Sequence[Item],
    *,
    roundings: Sequence[str],
    group_sizes: Sequence[int],
    per_channel: bool = True,
    squared_norm: float | None = None,
) -> list[Menu]:
    """A menu for every item, over ``roundings`` and ``group_sizes``.

    ``per_channel``: groups may lie within channels. What was not measured is taken for as sensitive per element as the
    mean. ``squared_norm``, of the gradient over the number of curved tensors, says what codes of these may add; where
    it is None, these have `CURVED_BITS` at least.
    """
    values = [i.sensitivity.value / i.tensor.numel for i in items if i.sensitivity and _is_known(i.sensitivity)]
    known = sorted(value for value in values if value < math.inf)
    mean = sum(known) / len(known) if known and sum(known) > 0 else 1.0
    floor = FLOOR * (known[len(known) // 2] if known else mean) or FLOOR * mean
    codes = _codes(roundings, group_sizes)
    return [_menu(item, mean, floor, codes, per_channel, squared_norm) for item in items]


def _menu(
    item: Item, mean: float, floor: float, codes: Sequence[Code], per_channel: bool, squared_norm: float | None
) -> Menu:
    tensor, how = item.tensor, item.how
    measured = item.sensitivity if _is_known(item.sensitivity) else None
    # What moves the gradient by nothing may do so later: a loss that had no weight in the measured step.
    per_element = measured.value / tensor.numel if measured is not None and measured.value != 0 else mean
    sensitivity = tensor.numel * max(per_element, floor)
    codes = [code for code in codes if code.bits != BFLOAT16_BITS or how.takes_bfloat16(tensor)]
    choices = _other_ways(item, sensitivity, codes)
    # Beside more exact bits than that, codes of values are of little use.
    is_crowded = how.mask_numel > MOST_MASK_BITS * tensor.numel and how.exact_allowed and not how.other_ways()
    for code in codes if how.values_allowed and not is_crowded else ():
        # Where backward bends, nothing but a measurement tells what rounding does.
        if code.bits < how.min_bits or (how.bends and measured is None):
            continue
        nbytes = _nbytes(item, TensorPlan(tensor.key, code))
        variance = _measured_variance(code, measured, sensitivity)
        if variance is None and measured is not None and code.rounding == "rotated":
            continue  # the groups that were looked at counted for nothing
        variance = sensitivity * relative_variance(code) if variance is None else variance
        choices.append(Choice(code, nbytes, variance))
        if not how.merges or not 2 <= code.bits <= WIDTHS[-1] or code.rounding == "rotated":
            continue
        variance = _measured_variance(code, measured, sensitivity, merged=True)
        if variance is None and how.merges_losslessly:
            variance = sensitivity * relative_variance(code, merged=True)
        # Otherwise it is not known what is done to the elements that the mask stops.
        if variance is not None:
            nbytes = _nbytes(item, TensorPlan(tensor.key, code, merged=True))
            choices.append(Choice(code, nbytes, variance, merged=True))
    if how.values_allowed and not is_crowded and measured is not None:
        choices += _by_place(item, measured, sensitivity, codes)
        choices += _per_channel(item, measured, sensitivity, codes) if per_channel else []
    if how.is_curved:
        choices = _curved(choices, squared_norm)
    if how.exact_allowed:
        choices.append(Choice(None, _nbytes(item, TensorPlan(tensor.key, None)), 0.0))
    finite = [choice for choice in choices if choice.variance < math.inf]
    if finite:
        return finite
    # What cannot be exact gets the widest code, of coefficients where these may be stored: codes of them are sound.
    widest, stored = Code(WIDTHS[-1]), "coefficients" if "coefficients" in how.other_ways() else "values"
    return [Choice(widest, _nbytes(item, TensorPlan(tensor.key, widest, stored=stored)), 0.0, stored=stored)]


def _curved(choices: Sequence[Choice], squared_norm: float | None) -> list[Choice]:
    """The choices with what codes of a curved tensor are to count for beyond first order."""
    found: list[Choice] = []
    for choice in choices:
        assert choice.code is not None
        bits = choice.code.bits
        if choice.stored != "values":
            found.append(choice)
        elif squared_norm is not None:
            more = BIAS_WEIGHT * (CURVED_BIAS * 4.0 ** (CURVED_AT - bits)) ** 2 * squared_norm
            found.append(replace(choice, variance=choice.variance + more))
        elif bits >= CURVED_BITS:
            found.append(choice)
    return found


def _by_place(item: Item, measured: Sensitivity, sensitivity: float, codes: Sequence[Code]) -> list[Choice]:
    """The choices with widths by place."""
    choices: list[Choice] = []
    if item.how.order[:1] != (0,):
        return choices
    for like in codes:
        places = measured.places.get(like.group_size)
        if like.bits != WIDTHS[0] or places is None:
            continue
        added = {bits: _measured_variance(replace(like, bits=bits), measured, sensitivity) for bits in WIDTHS}
        for pattern in list_patterns(places, CURVED_BITS if item.how.is_curved else item.how.min_bits):
            terms = [(share, added[bits]) for bits, share in pattern.shares.items()]
            known = [share * variance for share, variance in terms if variance is not None]
            if len(known) == len(terms):
                code = replace(like, bits=min(run.bits for run in runs_of(pattern.by_place)), by_place=pattern.by_place)
                choices.append(Choice(code, _nbytes(item, TensorPlan(item.tensor.key, code)), math.fsum(known)))
    return choices


def _per_channel(item: Item, measured: Sensitivity, sensitivity: float, codes: Sequence[Code]) -> list[Choice]:
    """The choices with groups within channels, of codes to which that is worth it."""
    tensor, how = item.tensor, item.how
    choices: list[Choice] = []
    if len(how.order) != len(tensor.shape) or len(how.order) < 2 or how.standardization is not None:
        return choices
    length = tensor.numel // max(tensor.shape[how.order[-1]], 1)
    for plain in codes:
        # Most groups are to lie within one channel.
        if not how.min_bits <= plain.bits <= NARROW_BITS or (
            length % plain.group_size and length < MANY_GROUPS * plain.group_size
        ):
            continue
        code = replace(plain, per_channel=True)
        variance, neighbours = (_measured_variance(each, measured, sensitivity) for each in (code, plain))
        if variance is not None and neighbours is not None and variance <= WORTH_MOVING * neighbours:
            choices.append(Choice(code, _nbytes(item, TensorPlan(tensor.key, code)), variance))
    return choices


def _nbytes(item: Item, entry: TensorPlan) -> int:
    """Bytes of the tensor by ``entry``, and of what has to be kept for its sake."""
    nbytes = item.how.nbytes(item.tensor, entry)
    return (item.tensor.storage_nbytes if nbytes is None else nbytes) + item.how.statistics_nbytes(entry.stored)


def _other_ways(item: Item, sensitivity: float, codes: Sequence[Code]) -> list[Choice]:
    """The choices where backward bends, beside the tensor's values with all masks; ``sensitivity`` is the tensor's.

    Codes of coefficients are sound, and need no measurement.
    """
    tensor, how = item.tensor, item.how
    choices: list[Choice] = []
    if item.sensitivity is not None and not item.sensitivity.squared_biases:
        # It could not be measured.
        return choices
    for stored in how.other_ways():
        measured = item.sensitivity.others.get(stored) if item.sensitivity is not None else None
        measured = measured if _is_known(measured) else None
        for code in codes if measured is not None or stored == "coefficients" else ():
            variance = _measured_variance(code, measured, measured.value if measured is not None else 0.0)
            variance = sensitivity * relative_variance(code) if variance is None else variance
            entry = TensorPlan(tensor.key, code, stored=stored)
            choices.append(Choice(code, _nbytes(item, entry), variance, stored=stored))
    return choices


def _codes(roundings: Sequence[str], group_sizes: Sequence[int]) -> list[Code]:
    """All codes, each once; bfloat16 ones are stochastic unless they are to be the nearest."""
    found: list[Code] = []
    for bits in WIDTHS:
        # Wide codes that are to be rotated have dither.
        several = [r for r in roundings if rounding_of(r, bits) == r or rounding_of(r, bits) not in roundings]
        found += [Code(bits, rounding, size) for rounding in several for size in group_sizes]
    rounding = "nearest" if list(roundings) == ["nearest"] else "stochastic"
    return found + [Code(BFLOAT16_BITS, rounding, size) for size in group_sizes]


def _measured_variance(
    code: Code, measured: Sensitivity | None, sensitivity: float, merged: bool = False
) -> float | None:
    """The variance of ``code``, scaled to ``sensitivity`` where that is more than was measured; None if not known."""
    known = None if measured is None else measured.variance(code, merged=merged)
    if measured is None or known is None:
        return None
    if not math.isfinite(known) or measured.value <= 0:
        # What moves the gradient by nothing, as measured, may have a pole all the same.
        return known if known > 0 else None
    bias = 0.0 if merged else (BIAS_WEIGHT - 1) * measured.squared_bias(code)
    return (known + bias) * (max(sensitivity / measured.value, 1.0) if measured.value < math.inf else 1.0)


def _is_known(sensitivity: Sensitivity | None) -> bool:
    """Whether it says something: what overflowed everywhere does not, but where backward bends, which is measured."""
    if sensitivity is None:
        return False
    return bool(sensitivity.squared_biases) or all(v < math.inf for v in sensitivity.variances.values())
