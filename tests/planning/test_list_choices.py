"""What a menu offers, and at what price."""

from dataclasses import replace

import pytest
import torch

from gact_fx.codec.code import WIDTHS, Code, step_variance
from gact_fx.codec.layout import blob_nbytes
from gact_fx.passes.encodings import Quantize
from gact_fx.passes.find_bends import Coefficients
from gact_fx.planning.allocate_bits import Choice, Menu
from gact_fx.planning.list_choices import FLOOR, Item, list_choices
from gact_fx.records import SavedTensor, Sensitivity

GROUP = 256
NUMEL = 4096


def item(value: float | None, numel: int = NUMEL, dtype: torch.dtype = torch.float32, **how: object) -> Item:
    """A tensor of which c_l was measured, or not."""
    nbytes = numel * dtype.itemsize
    tensor = SavedTensor("t", "t#0", "t", "", (numel,), (1,), dtype, 0, nbytes, "nobody")
    sensitivity = None if value is None else measured(value)
    return Item(tensor, Quantize("t", "", (0,), **how), sensitivity)  # type: ignore[arg-type]


def measured(value: float) -> Sensitivity:
    shares = {"stochastic": 1.0, "dither": 0.4}
    codes = {
        Code(bits, rounding, GROUP): value * share * step_variance(bits)
        for bits in WIDTHS
        for rounding, share in shares.items()
    }
    return Sensitivity(value, {**codes, Code(16, "stochastic", GROUP): value * 1e-6})


def menus(
    *items: Item, roundings: tuple[str, ...] = ("stochastic", "dither"), squared_norm: float | None = None
) -> list[Menu]:
    return list_choices(items, roundings=roundings, group_sizes=[GROUP], squared_norm=squared_norm)


def way(choice: Choice) -> tuple[int | None, str | None]:
    return (None, None) if choice.code is None else (choice.code.bits, choice.code.rounding)


def find(menu: Menu, bits: int | None, rounding: str = "stochastic") -> Choice:
    (found,) = [choice for choice in menu if way(choice) == (bits, rounding if bits is not None else None)]
    return found


def test_every_way_is_offered_once_with_its_bytes_and_variance() -> None:
    (menu,) = menus(item(2.0))
    assert [way(c) for c in menu] == [
        *((bits, rounding) for bits in WIDTHS for rounding in ("stochastic", "dither")),
        (16, "stochastic"),
        (None, None),
    ]
    for bits in WIDTHS:
        assert find(menu, bits).nbytes == blob_nbytes(NUMEL, torch.float32, bits, GROUP, 0)
        assert find(menu, bits).variance == pytest.approx(2.0 * step_variance(bits))
        assert find(menu, bits, "dither").variance == pytest.approx(0.8 * step_variance(bits))
    assert (find(menu, None).nbytes, find(menu, None).variance) == (NUMEL * 4, 0)


def test_group_sizes() -> None:
    (menu,) = list_choices([item(2.0)], roundings=["stochastic"], group_sizes=[64, 256])
    nbytes = {c.code.group_size: c.nbytes for c in menu if c.code is not None and c.bits == 4}
    assert nbytes == {size: blob_nbytes(NUMEL, torch.float32, 4, size, 0) for size in (64, 256)}


def test_masks_have_their_bytes_and_forbid_exactness() -> None:
    (menu,) = menus(item(2.0, masks=("m",), mask_numel=NUMEL, exact_allowed=False))
    assert all(choice.bits is not None for choice in menu)
    assert find(menu, 4).nbytes == blob_nbytes(NUMEL, torch.float32, 4, GROUP, NUMEL)


def test_a_least_width() -> None:
    (menu,) = menus(item(2.0, min_bits=6))
    assert {choice.bits for choice in menu} == {6, 7, 8, 16, None}


def test_of_a_gradient_of_unknown_size_curvature_has_a_least_width() -> None:
    (menu,) = menus(item(2.0, is_curved=True))
    assert {choice.bits for choice in menu} == {6, 7, 8, 16, None}


def test_of_a_gradient_of_known_size_curvature_has_a_share() -> None:
    (curved,), (plain,) = menus(item(2.0, is_curved=True), squared_norm=50.0), menus(item(2.0))
    assert {choice.bits for choice in curved} == {choice.bits for choice in plain}
    # A bias of 1 % of the gradient's norm at 4 bits counts tenfold, and is four times less with every bit more.
    for bits, share in ((4, 0.01), (5, 0.0025), (3, 0.04)):
        more = find(curved, bits).variance - find(plain, bits).variance
        assert more == pytest.approx(10 * share**2 * 50.0)
    assert find(curved, None).variance == 0


def test_curvature_counts_for_groups_within_channels_too() -> None:
    first = item(2.0, is_curved=True)
    assert first.sensitivity is not None
    by_channel = {replace(code, per_channel=True): v / 4 for code, v in first.sensitivity.variances.items()}
    known = replace(first.sensitivity, variances={**first.sensitivity.variances, **by_channel})
    tensor = replace(first.tensor, shape=(NUMEL // 2, 2), stride=(2, 1))
    curved = Item(tensor, replace(first.how, order=(0, 1)), known)
    (unknown,), (counted,) = menus(curved), menus(curved, squared_norm=1e6)
    assert not any(choice.code and choice.code.per_channel for choice in unknown)
    found = [choice for choice in counted if choice.code and choice.code.per_channel]
    assert found and all(choice.variance > 1e5 for choice in found)


def test_rotated_codes_are_narrow_and_must_have_been_measured() -> None:
    roundings = ("stochastic", "dither", "rotated")
    unmeasured = Item(item(2.0).tensor, item(2.0).how, None)
    menu, other = menus(unmeasured, item(2.0), roundings=roundings)
    rotated = {c.bits: c.variance for c in menu if c.code and c.code.rounding == "rotated"}
    assert set(rotated) == {1, 2, 3, 4}
    assert all(variance < find(menu, bits, "dither").variance for bits, variance in rotated.items() if bits)
    assert not any(c.code and c.code.rounding == "rotated" for c in other)
    # Where nothing else is wanted, wide codes have the name as well.
    (alone,) = menus(unmeasured, roundings=("rotated",))
    assert {(c.bits, c.code.rounding) for c in alone if c.code and c.bits != 16} == {(b, "rotated") for b in WIDTHS}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_bfloat16_codes_are_for_float32(dtype: torch.dtype) -> None:
    (menu,) = menus(item(2.0, dtype=dtype))
    assert 16 not in {choice.bits for choice in menu}
    assert find(menu, None).nbytes == NUMEL * dtype.itemsize


def test_a_view_of_more_memory_costs_all_of_it() -> None:
    plain = item(2.0)
    larger = Item(
        SavedTensor("t", "t#0", "t", "", (NUMEL,), (2,), torch.float32, 0, NUMEL * 8, "nobody"),
        plain.how,
        plain.sensitivity,
    )
    (menu,) = menus(larger)
    assert find(menu, None).nbytes == NUMEL * 8


def test_statistics_beside_a_tensor_count_but_for_those_that_coefficients_free() -> None:
    coefficients = Coefficients(("e",), torch.float32, NUMEL, (), 0, frees=("largest",), retakes=False)
    statistics = (("largest", 100), ("sum", 10))
    (menu,) = menus(item(2.0, coefficients=coefficients, statistics=statistics))
    blob = blob_nbytes(NUMEL, torch.float32, 4, GROUP, 0)
    found = {c.stored: c.nbytes - blob for c in menu if way(c) == (4, "stochastic")}
    assert found == {"values": 110}
    bent = replace(measured(2.0), squared_biases=dict.fromkeys(measured(2.0).variances, 0.0))
    how = Quantize("t", "", (0,), bends=True, coefficients=coefficients, statistics=statistics)
    (menu,) = menus(Item(item(2.0).tensor, how, replace(bent, others={"coefficients": measured(1.0)})))
    found = {c.stored: c.nbytes - blob for c in menu if way(c) == (4, "stochastic")}
    assert found == {"values": 110, "coefficients": 10}
    assert find(menu, None).nbytes == NUMEL * 4 + 110


def test_what_hardly_matters_is_taken_for_a_hundredth_of_the_median() -> None:
    """Per element. What moved the gradient by nothing may belong to a loss that had no weight, and is like the mean."""
    values = [1e-9, 0.0, 1.0, 3.0, 5.0]
    found = menus(*(item(value, numel=NUMEL) for value in values))
    assert find(found[0], 4).variance == pytest.approx(FLOOR * 1.0 * step_variance(4))
    assert find(found[1], 4).variance == pytest.approx(sum(values) / 5 * step_variance(4))
    assert find(found[2], 4).variance == pytest.approx(1.0 * step_variance(4))
    # What was measured keeps its proportions; what is exactly nothing has those of theory.
    assert find(found[0], 4, "dither").variance == pytest.approx(0.4 * find(found[0], 4).variance)
    assert find(found[1], 4, "dither").variance == pytest.approx(0.5 * find(found[1], 4).variance)


@pytest.mark.parametrize("value", [None, float("inf"), float("nan")])
def test_what_was_not_measured_is_like_the_mean(value: float | None) -> None:
    """Per element, so that a tensor of twice the size counts twice."""
    _, _, unknown = menus(item(1.0), item(3.0), item(value, numel=2 * NUMEL))
    assert find(unknown, 3).variance == pytest.approx(2 * 2.0 * step_variance(3))


@pytest.mark.parametrize("value", [None, 0.0])
def test_where_nothing_is_known_all_count_alike(value: float | None) -> None:
    first, second = menus(item(value), item(value, numel=2 * NUMEL))
    assert 0 < find(first, 4).variance == pytest.approx(find(second, 4).variance / 2)
    assert find(first, 4).variance / find(first, 2).variance == pytest.approx(step_variance(4) / step_variance(2))


def test_nearest_is_planned_as_if_it_were_stochastic() -> None:
    stochastic, nearest = (menus(item(2.0), roundings=(rounding,))[0] for rounding in ("stochastic", "nearest"))
    assert find(nearest, 4, "nearest").variance == find(stochastic, 4).variance
