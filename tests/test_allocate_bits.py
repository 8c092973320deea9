from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gact_fx.codec_layout import blob_nbytes
from gact_fx.passes import Item, allocate_bits, step_variance


def make_item(groups: int, dtype: torch.dtype, exponent: float, mask_numel: int) -> Item:
    return Item(groups * 256, dtype, groups * 256 * 10.0**exponent, mask_numel)


# Per element within two decades, so that the floor under sensitivities changes none of them.
ITEMS = st.builds(
    make_item,
    groups=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    exponent=st.floats(-0.9, 0.9),
    mask_numel=st.sampled_from([0, 256]),
)


def cost(items: list[Item], bits: tuple[int | None, ...]) -> int:
    return sum(
        (item.exact_nbytes or 0) if b is None else blob_nbytes(item.numel, item.dtype, b, 256, item.mask_numel)
        for item, b in zip(items, bits, strict=True)
    )


def variance(items: list[Item], bits: tuple[int | None, ...]) -> float:
    return sum((i.sensitivity or 0) * step_variance(b) for i, b in zip(items, bits, strict=True) if b is not None)


@given(st.lists(ITEMS, min_size=1, max_size=3), st.floats(2, 8.5))
@settings(max_examples=60, deadline=None)
def test_within_the_budget_and_one_step_of_the_optimum(items: list[Item], budget: float) -> None:
    chosen = tuple(allocate_bits(items, budget, 256))
    allowed = budget / 8 * sum(item.numel for item in items)
    feasible = [bits for bits in product(range(1, 9), repeat=len(items)) if cost(items, bits) <= allowed]
    if not feasible:
        assert chosen == (1,) * len(items)
        return
    assert cost(items, chosen) <= allowed
    # With one step more for the tensor where it helps most, greedy is never worse than the optimum without.
    optimum = min(variance(items, bits) for bits in feasible)
    better = [
        variance(items, (*chosen[:i], min(8, (bits or 8) + 1), *chosen[i + 1 :])) for i, bits in enumerate(chosen)
    ]
    assert min([variance(items, chosen), *better]) <= optimum * (1 + 1e-9) + 1e-30


def test_more_sensitive_tensors_get_more_bits() -> None:
    items = [Item(4096, torch.float32, sensitivity) for sensitivity in (1e-6, 1e-3, 1.0)]
    low, middle, high = (bits or 32 for bits in allocate_bits(items, 4, 256))
    assert low < middle < high


def test_unknown_sensitivities_are_taken_alike() -> None:
    widths = allocate_bits([Item(4096, torch.float32, None)] * 4, 4.2, 256)
    assert widths == [4, 4, 4, 4]


def test_exact_only_where_it_is_allowed_and_pays() -> None:
    vital = Item(1024, torch.float32, 1e6, exact_nbytes=4096)
    masked = Item(1024, torch.float32, 1e6)
    cheap = Item(102400, torch.float32, 1e-6)
    assert allocate_bits([vital, masked, cheap], 4, 256)[:2] == [None, 8]
    # A view of a large storage would keep all of it.
    view = Item(1024, torch.float32, 1e6, exact_nbytes=1 << 20)
    assert allocate_bits([view, cheap], 4, 256)[0] == 8


def test_zero_sensitivity_is_not_an_error() -> None:
    assert len(allocate_bits([Item(1024, torch.float32, 0.0)] * 2, 4, 256)) == 2
    assert allocate_bits([], 4, 256) == []


def test_non_finite_sensitivities_count_as_unknown() -> None:
    items = [Item(4096, torch.float32, value) for value in (1.0, float("nan"), float("inf"), 1.0)]
    assert allocate_bits(items, 4.2, 256) == [4, 4, 4, 4]


def test_no_width_below_the_least_allowed() -> None:
    items = [Item(4096, torch.float32, 1e-9, min_bits=6), Item(4096, torch.float32, 1.0)]
    assert allocate_bits(items, 4, 256)[0] == 6
