"""Rotated codes: errors of the size that theory says, and no bias, whatever the group."""

import math

import pytest
import torch

from gact_fx import ops
from gact_fx.codec.code import ROTATED_VARIANCES
from gact_fx.codec.layout import SOURCE_DTYPES
from gact_fx.codec.rotation import hadamard, tree_sum

GROUPS = {
    "normal": lambda: torch.randn(64, 256),
    "far from zero": lambda: torch.randn(64, 256) + 100,
    "uniform": lambda: torch.rand(64, 256),
    "positive": lambda: torch.randn(64, 256).relu(),
    "sparse": lambda: torch.where(torch.rand(64, 256) < 0.5, torch.randn(64, 256), 0),
    "two values": lambda: torch.randint(0, 2, (64, 256)).float(),
}


def decoded(x: torch.Tensor, bits: int, seed: int, group_size: int = 256) -> torch.Tensor:
    blob = ops.compress(x, bits, group_size, seed, None, "rotated")
    return ops.decompress(blob, x.shape, x.dtype, bits, group_size, seed, "rotated")


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("bits", ROTATED_VARIANCES)
def test_the_error_has_the_known_part_of_the_variance_and_no_bias(kind: str, bits: int) -> None:
    torch.manual_seed(bits)
    x = GROUPS[kind]()
    errors = torch.stack([decoded(x, bits, seed) - x for seed in range(100)])
    spread = float(x.var(1, correction=0).mean())
    assert float(errors.square().mean()) == pytest.approx(ROTATED_VARIANCES[bits] * spread, rel=0.08)
    # Of a mean of 100 draws an unbiased error leaves a hundredth of its variance. A group of a few large elements is
    # not quite normal when it was turned, which biases these by a little.
    bias = float((errors.mean(0).square() - errors.var(0) / 100).mean())
    assert bias < 2e-3 * spread


@pytest.mark.parametrize("largest", [3.0, 5.0, 8.0, 16.0, 30.0, 100.0, 1000.0])
@pytest.mark.parametrize("bits", ROTATED_VARIANCES)
def test_an_element_that_sticks_out_biases_neither_itself_nor_the_others(bits: int, largest: float) -> None:
    torch.manual_seed(bits)
    x = torch.randn(64, 256)
    x[:, 7] = largest
    found = torch.stack([decoded(x, bits, seed) for seed in range(400)]).mean(0)
    assert float((found[:, 7] / largest).mean()) == pytest.approx(1, abs=0.05)
    rest = torch.cat([x[:, :7], x[:, 8:]], 1)
    gain = float((torch.cat([found[:, :7], found[:, 8:]], 1) * rest).sum() / rest.square().sum())
    # Dither over the range of the largest has so much noise that 400 draws say less.
    assert gain == pytest.approx(1, abs=0.03 if largest < 1000 else 0.2)


@pytest.mark.parametrize("group_size", [64, 256, 1024])
@pytest.mark.parametrize("bits", ROTATED_VARIANCES)
def test_the_product_with_the_deviations_is_their_squared_norm(bits: int, group_size: int) -> None:
    x = torch.rand(50, group_size, dtype=torch.float64)
    deviations = x - x.mean(1, keepdim=True)
    found = decoded(x, bits, 3, group_size) - x.mean(1, keepdim=True)
    # The scale is stored in bfloat16.
    assert torch.allclose((found * deviations).sum(1), deviations.square().sum(1), rtol=2**-8)


@pytest.mark.parametrize("dtype", SOURCE_DTYPES, ids=str)
def test_constant_groups_are_exact(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, 3.7, -1e-30, 2e-3]).repeat_interleave(64).to(dtype)
    assert torch.equal(decoded(x, 2, 1, 64), x)


@pytest.mark.parametrize("dtype", SOURCE_DTYPES, ids=str)
def test_groups_that_are_not_finite_huge_or_tiny_are_irregular(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 64)
    x[0, 3], x[0, 7] = math.nan, math.inf
    x[1] *= 1e14 if dtype != torch.float16 else 2e4
    x[2] *= 1e-14
    x = x.to(dtype)
    found = decoded(x, 4, 1, 64)
    assert torch.equal(found.isnan(), x.isnan()) and torch.equal(found.isinf(), x.isinf())
    for at, (row, got) in enumerate(zip(x, found, strict=True)):
        finite = row.isfinite()
        row, got = row[finite].double(), got[finite].double()
        # Irregular codes lie within a step; those that were turned have no bound that is as near.
        assert float((got - row).abs().max()) <= (1.6 / 13 if at < 3 else 1) * float(row.max() - row.min())


@pytest.mark.parametrize("numel", [257, 300, 500, 45])
def test_the_last_group_has_no_more_error_than_others(numel: int) -> None:
    """Every element is read from all codes of its group, those of the padding too."""
    torch.manual_seed(numel)
    x = torch.randn(numel)
    last = x[numel // 256 * 256 :]
    padded = torch.cat([last, last[-1:].expand(256 - len(last))])
    errors = torch.stack([decoded(x, 2, seed) - x for seed in range(300)])[:, numel // 256 * 256 :]
    # Where most of a group is padding, the others have more of the error than that; without the padding's codes they
    # would have twenty times as much.
    assert float(errors.square().mean()) <= 3 * ROTATED_VARIANCES[2] * float(padded.var(correction=0)) + 1e-9


def test_wide_codes_are_those_of_dither() -> None:
    x = torch.randn(1000)
    for bits in (5, 8):
        blob = ops.compress(x, bits, 256, 7, None, "dither")
        assert torch.equal(ops.compress(x, bits, 256, 7, None, "rotated"), blob)
        assert torch.equal(decoded(x, bits, 7), ops.decompress(blob, x.shape, x.dtype, bits, 256, 7, "dither"))


def test_every_seed_turns_groups_in_another_way() -> None:
    x = torch.randn(256).expand(4, 256)
    groups = decoded(x, 1, 0) - x
    others = decoded(x, 1, 1) - x
    errors = torch.cat([groups, others])
    assert float((torch.corrcoef(errors) - torch.eye(8)).abs().max()) < 0.4


def test_the_transform_is_its_own_inverse_but_for_its_length() -> None:
    x = torch.randn(3, 64, dtype=torch.float64)
    assert torch.allclose(hadamard(hadamard(x)), 64 * x)
    assert torch.allclose(tree_sum(x), x.sum(1))
