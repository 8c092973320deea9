"""Predicted variances of codes within channels against compressing and decompressing again and again."""

import pytest
import torch

from gact_fx import ops
from gact_fx.codec.code import Code
from gact_fx.profiling.channel_ranges import ChannelRanges
from gact_fx.profiling.rounding_meter import RoundingMeter

DRAWS = 60


def values(length: int, channels: int = 24) -> torch.Tensor:
    """Every fifth channel sticks out, and one is constant."""
    x = torch.randn(length, channels, generator=torch.Generator().manual_seed(length))
    x[:, ::5] *= 50
    x[:, 3] = 2.5
    return x


def simulated(x: torch.Tensor, weights: torch.Tensor, code: Code) -> float:
    """The mean of sum_i a_i error_i^2 over seeds."""
    order = code.order_of(range(x.dim()))
    inverse = sorted(range(x.dim()), key=order.__getitem__)
    total = 0.0
    for seed in range(DRAWS):
        codec = (code.bits, code.group_size, seed)
        blob = ops.compress(x.permute(order), *codec, rounding=code.rounding)
        shape = [x.shape[d] for d in order]
        found = ops.decompress(blob, shape, x.dtype, *codec, rounding=code.rounding).permute(inverse)
        total += float((weights * (found.double() - x.double()).square()).sum())
    return total / DRAWS


@pytest.mark.parametrize("length", [256, 1024, 320])
@pytest.mark.parametrize("rounding", ["dither", "stochastic"])
@pytest.mark.parametrize("shape", [(), (4, -1)])
def test_variances_are_those_of_the_codec(length: int, rounding: str, shape: tuple[int, ...]) -> None:
    x = values(length)
    x = x.view(*shape, x.shape[-1]) if shape else x
    weights = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) + 0.1
    meter = RoundingMeter(x, 8)
    for factor in (0.5, 1.5):
        meter.add((factor * weights).sqrt())
    found = meter.result((32, 64))
    for size in (32, 64):
        for bits in (2, 4):
            code = Code(bits, rounding, size, per_channel=True)
            # Position between codes is not looked at: a sixth is the mean over them.
            near = 0.06 if rounding == "dither" else 0.25
            assert found.variance(code) == pytest.approx(simulated(x, weights, code), rel=near)


@pytest.mark.parametrize("size", [256, 1024])
def test_a_few_rows_foretell_longer_groups(size: int) -> None:
    x = values(4096)
    few, all_rows = ChannelRanges(x[:128]), ChannelRanges(x)
    few.add(torch.ones(x[:128].numel()))
    all_rows.add(torch.ones(x.numel()))
    code = Code(4, "dither", size, per_channel=True)
    found = 32 * few.variances([size], 1)[code]
    # Ranges grow more slowly, the longer groups are.
    assert 1 <= found / all_rows.variances([size], 1)[code] < 1.6


@pytest.mark.parametrize("length", [100, 128])
def test_elements_that_count_alike_have_their_number_for_a_weight(length: int) -> None:
    x = values(length)
    alike, ones = ChannelRanges(x), ChannelRanges(x)
    alike.weigh_equally()
    ones.add(torch.ones(x.numel()))
    assert alike.variances([64], 1) == pytest.approx(ones.variances([64], 1))
    ones.scale(0.25)
    assert alike.variances([64], 4) == pytest.approx(ones.variances([64], 1))


def test_who_has_channels() -> None:
    assert ChannelRanges.reads(torch.empty(64, 8))
    assert ChannelRanges.reads(torch.empty(2, 32, 8))
    assert not ChannelRanges.reads(torch.empty(512))
    assert not ChannelRanges.reads(torch.empty(512, 1))
    assert not ChannelRanges.reads(torch.empty(63, 8))
    # Of exact values it is not known how they lie in memory.
    assert not any(code.per_channel for code in RoundingMeter(torch.randn(64, 8)).result((64,)).variances)
