"""The codes next to an element, against what the codec makes of it."""

import pytest
import torch

from gact_fx import ops
from gact_fx.profiling.neighbours import ROUNDINGS, codes_beside, farthest


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_codes_are_as_far_from_an_element_as_its_neighbours(dtype: torch.dtype, rounding: str, bits: int) -> None:
    x = (torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    low, high, chances = ROUNDINGS[rounding](x, bits)
    slack = (high - low).amax() * 0.02 + torch.finfo(dtype).eps * 16
    assert bool((low <= x + slack).all() and (x <= high + slack).all())
    assert bool((chances[0] + chances[1] <= 1 + 1e-3).all())
    squares = torch.zeros(1000)
    for seed in range(20):
        moved = coded(x, bits, seed, rounding).float() - x.float()
        assert bool((moved.abs() <= (high - low).float() + slack).all())
        squares += moved.square() / 20
    sides = zip((low, high), chances, strict=True)
    down, up = ((side.float() - x.float()).square() * chance.float() for side, chance in sides)
    # Half precision has a rounding of its own.
    own = (x.float() * torch.finfo(dtype).eps).square().mean() / 12
    assert float(squares.mean()) == pytest.approx(float((down + up).mean() + own), rel=0.15)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_largest_element_is_a_code_by_luck_alone(bits: int) -> None:
    """Its error comes of the rounding of the step, which is none where the range's share happens to be a bfloat16."""
    x = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0))
    # The first group's range is a whole number of steps that bfloat16 has.
    x[0] = x[0].clamp(0, 1) * (2**bits - 1) * 2**-6
    x[0, :2] = torch.tensor([0.0, 2**bits - 1]) * 2**-6
    largest = x.argmax(1, keepdim=True)
    assert float((coded(x, bits, 0, "stochastic") - x).gather(1, largest)[0]) == 0
    ranges = x.amax(1, keepdim=True) - x.amin(1, keepdim=True)
    low, high, (down, up) = codes_beside(x, bits)
    expected = (down * (low - x).square() + up * (high - x).square()).gather(1, largest) / ranges.square()
    errors = [(coded(x, bits, seed, "stochastic") - x).gather(1, largest) / ranges for seed in range(8)]
    found = torch.stack(errors).square().mean(0)
    assert float(expected[1:].mean()) == pytest.approx(float(found[1:].mean()), rel=0.3)
    assert float(expected[0]) == pytest.approx(float(expected[1:].mean()), rel=0.3)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
def test_no_code_is_farther(rounding: str, bits: int) -> None:
    """Whatever the scale, on which depends how steps are rounded."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    x[0, :3] = torch.tensor([-torch.inf, torch.inf, torch.nan])
    low, high = farthest(x, bits, rounding)
    assert low[0, :2].equal(x[0, :2]) and high[0, :2].equal(x[0, :2])
    least, most = torch.full_like(x, torch.inf), torch.full_like(x, -torch.inf)
    for seed in range(64):
        found = coded(x * (1 + seed / 64), bits, seed, rounding) / (1 + seed / 64)
        least, most = least.minimum(found), most.maximum(found)
    slack = 1e-5
    assert bool((least >= low - slack)[1:].all() and (most <= high + slack)[1:].all())
    # Not all of that is slack.
    ends = x[1:].argmax(1, keepdim=True)
    assert bool((most[1:].gather(1, ends) > x[1:].gather(1, ends)).any())


def coded(x: torch.Tensor, bits: int, seed: int, rounding: str) -> torch.Tensor:
    blob = ops.compress(x, bits, 256, seed, rounding=rounding)
    return ops.decompress(blob, x.shape, x.dtype, bits, 256, seed, rounding=rounding)


@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
def test_half_precision_has_no_room_for_the_span_of_its_numbers(rounding: str) -> None:
    x = torch.tensor([-4e4, 4e4] * 128).half()
    low, high, chances = ROUNDINGS[rounding](x, 8)
    assert all(bool(t.isfinite().all()) for t in (low, high, *chances))
    assert bool((low <= x).all() and (x <= high).all()) and float((high - low).amax()) < 400
