"""The codes next to an element, against what the codec makes of it."""

import pytest
import torch

from gact_fx import ops
from gact_fx.profiling.neighbours import ROUNDINGS


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_codes_lie_between_neighbours(dtype: torch.dtype, rounding: str, bits: int) -> None:
    x = (torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    low, high, chances = ROUNDINGS[rounding](x, bits)
    slack = (high - low).amax() * 0.02 + torch.finfo(dtype).eps * 16
    for seed in range(20):
        blob = ops.compress(x, bits, 256, seed, rounding=rounding)
        found = ops.decompress(blob, x.shape, dtype, bits, 256, seed, rounding=rounding)
        assert bool(((found >= low - slack) & (found <= high + slack)).all())
    assert bool((chances[0] + chances[1] <= 1 + 1e-3).all())


@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
def test_half_precision_has_no_room_for_the_span_of_its_numbers(rounding: str) -> None:
    x = torch.tensor([-4e4, 4e4] * 128).half()
    low, high, chances = ROUNDINGS[rounding](x, 8)
    assert all(bool(t.isfinite().all()) for t in (low, high, *chances))
    assert bool((low <= x).all() and (x <= high).all()) and float((high - low).amax()) < 400
