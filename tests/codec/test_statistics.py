"""The noise of rounding, as statistics: no bias, the variance of theory, and no correlation that training could feel.

Seeds are fixed, so that a test either always passes or never does. Bounds are those that fair noise exceeds once in
10^5 tests, however many values a test looks at; the mean errors that the promise is about must lie within 3 standard
errors. What the noise must not do is spelled out in each test.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from conftest import Mixed, gradients
from test_codec_hypothesis import steps_and_irregular
from torch import nn

import gact_fx
from gact_fx import ops
from gact_fx.codec.by_place import count_places, runs_of
from gact_fx.codec.code import Code
from gact_fx.graphs.interpreter import GraphInterpreter
from gact_fx.plan import tensor_seed

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BITS = (1, 2, 4, 8)
COMPILED = ops.has_compiled_kernels("cpu")
SEEDS = 2000 if COMPILED else 60  # per combination; every bound holds for any number, the power grows with it
GROUP = 64
NUMEL = 8 * GROUP
SHARES = (0, 16, 32, 48)  # elements that share a hash
NORMAL_BITS = 0x3F80  # bfloat16 1.0


def _heavy_tailed(generator: torch.Generator) -> torch.Tensor:
    """Student's t with two degrees of freedom: infinite variance."""
    normal = torch.randn(3, NUMEL, generator=generator)
    return normal[0] / normal[1:].square().mean(0).sqrt()


KINDS: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "gaussian": lambda generator: torch.randn(NUMEL, generator=generator),
    "relu": lambda generator: torch.randn(NUMEL, generator=generator).relu(),
    "gelu": lambda generator: nn.functional.gelu(torch.randn(NUMEL, generator=generator)),
    "softmax": lambda generator: (2 * torch.randn(8, NUMEL // 8, generator=generator)).softmax(-1).view(-1),
    "heavy-tailed": _heavy_tailed,
}


# ---- What fair noise does ----------------------------------------------------------------------------------------


def normal_bound(count: int = 1) -> float:
    """The magnitude that the largest of ``count`` standard normal draws exceeds once in 10^5 times."""
    return -float(torch.special.ndtri(torch.tensor(1e-5 / (2 * count), dtype=torch.float64)))


def chi_square_z(statistic: float, freedom: int) -> float:
    """A chi-square statistic as a standard normal one (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


def assert_white(z: torch.Tensor) -> None:
    """Hold that these are independent standard normal draws: their mean, their mean square and the largest."""
    z, count = z.double().flatten(), z.numel()
    assert z.isfinite().all() and count > 0
    largest, total = float(z.abs().max()), float(z.sum()) / count**0.5
    spread = chi_square_z(float(z.square().sum()), count)
    message = f"of {count} z-scores: largest {largest:.2f}, mean {total:.2f}, mean square {spread:.2f} as z-scores"
    assert largest <= normal_bound(count), message
    assert abs(total) <= normal_bound(), message
    assert abs(spread) <= normal_bound(), message


def assert_uniform(values: torch.Tensor) -> None:
    """Kolmogorov and Smirnov's test against the uniform distribution over [0, 1]."""
    ordered, count = values.double().flatten().sort().values, values.numel()
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = max(float((ordered - steps[:-1]).max()), float((steps[1:] - ordered).max())) * count**0.5
    assert distance <= 2.47, f"Kolmogorov-Smirnov distance {distance:.2f}"  # 2 exp(-2 d^2) = 10^-5


def assert_even(values: torch.Tensor, bins: int) -> None:
    """Chi-square test that rows of values in [0, 1) fill the cube of ``bins`` per side evenly, nor too evenly."""
    cell = torch.zeros(values.shape[0], dtype=torch.int64)
    for column in values.unbind(1):
        cell = cell * bins + (column * bins).long()
    cells = bins ** values.shape[1]
    found, expected = torch.bincount(cell, minlength=cells).double(), values.shape[0] / cells
    assert expected >= 10
    assert abs(chi_square_z(float((found - expected).square().sum()) / expected, cells - 1)) <= normal_bound()


def centred(u: torch.Tensor) -> torch.Tensor:
    """Uniform values as ones of mean zero and variance one."""
    return (u - 0.5) * 12**0.5


def centred_square(u: torch.Tensor) -> torch.Tensor:
    """The squares of what lies off the middle, likewise: noise may hide a dependence from plain correlations."""
    return ((u - 0.5).square() - 1 / 12) * 180**0.5


MOMENTS = pytest.mark.parametrize("moment", [centred, centred_square], ids=["linear", "quadratic"])


def correlations(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """z-scores of the correlations of all columns of two matrices, whose rows are independent draws."""
    return first.T.float() @ second.float() / first.shape[0] ** 0.5


def upper(matrix: torch.Tensor) -> torch.Tensor:
    """The entries above the diagonal."""
    row, column = torch.triu_indices(*matrix.shape, offset=1)  # type: ignore[misc]
    return matrix[row, column]


def autocorrelations(sequence: torch.Tensor) -> torch.Tensor:
    """z-scores of the cyclic autocorrelations of a white sequence at every distance from 1 to below half its length."""
    spectrum = torch.fft.rfft(sequence.double().flatten())
    return torch.fft.irfft(spectrum.abs().square())[1 : sequence.numel() // 2] / sequence.numel() ** 0.5


# ---- What the operators do ---------------------------------------------------------------------------------------


def decoded(x: torch.Tensor, bits: int, rounding: str, seeds: Iterable[int], group_size: int = GROUP) -> torch.Tensor:
    """What a tensor comes back as, in double, a row per seed."""
    options = (bits, group_size)
    blobs = ((seed, ops.compress(x, *options, seed, None, rounding)) for seed in seeds)
    rows = [ops.decompress(blob, x.shape, x.dtype, *options, seed, rounding).view(-1) for seed, blob in blobs]
    return torch.stack(rows).double()


def group_metadata(
    blob: torch.Tensor, x: torch.Tensor, bits: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each element's group's minimum and step, and how many steps it lies above the minimum; in double."""
    flat = x.reshape(-1).double()
    step, irregular = steps_and_irregular(blob, x.numel(), x.dtype, bits, group_size)
    assert not irregular.any() and x.numel() % group_size == 0
    minimum = flat.view(-1, group_size).amin(1).repeat_interleave(group_size)
    return minimum, step, torch.where(step == 0, 0.0, (flat - minimum) / step)


def moments(x: torch.Tensor, bits: int, rounding: str) -> tuple[torch.Tensor, ...]:
    """Theory: each element's mean, variance and fourth central moment, and its ``p``, the part of a step above a code.

    Decoded values are rounded to the tensor's dtype, which is no noise; of 16-bit dtypes it shows, so it is done here.
    """
    minimum, step, position = group_metadata(ops.compress(x, bits, GROUP), x, bits, GROUP)
    code = position.floor()
    p = position - code
    real = torch.float64 if x.dtype == torch.float64 else torch.float32
    if rounding == "stochastic":
        values = torch.stack([minimum + code * step, minimum + (code + 1) * step], 1)
        weights = torch.stack([1 - p, p], 1)
    else:
        nodes = (torch.arange(2048, dtype=torch.float64) + 0.5) / 2048 - 0.5
        values = x.double()[:, None] + step[:, None] * nodes
        weights = torch.full((1, 2048), 1 / 2048, dtype=torch.float64)
    values = values.to(real).to(x.dtype).double()
    mean = (values * weights).sum(1)
    deviation = values - mean[:, None]
    variance = (deviation.square() * weights).sum(1)
    fourth = (deviation.square().square() * weights).sum(1)
    if x.dtype.itemsize > 2:  # theory as the promise states it
        torch.testing.assert_close(mean, x.double(), rtol=1e-6, atol=1e-6 * float(step.max()))
        stated = step.square() * (p * (1 - p) if rounding == "stochastic" else 1 / 12)
        torch.testing.assert_close(variance, stated, rtol=1e-4, atol=1e-6 * float(step.max()) ** 2)
    return mean, variance, fourth, p


def draw(kind: str, dtype: torch.dtype, bits: int) -> torch.Tensor:
    number = DTYPES.index(dtype) * 10 + bits
    return KINDS[kind](torch.Generator().manual_seed(number)).to(dtype)


def seeds_of(kind: str, dtype: torch.dtype, bits: int) -> range:
    """Neighbouring integers, other ones for every combination, so that the combinations are independent."""
    number = (list(KINDS).index(kind) * len(DTYPES) + DTYPES.index(dtype)) * 16 + bits
    return range(number * SEEDS, (number + 1) * SEEDS)


# ---- Bias and variance -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
@pytest.mark.parametrize("kind", KINDS)
def test_mean_error_is_zero_and_variance_that_of_theory(kind: str, rounding: str) -> None:
    """In total within 3 standard errors, and for every width, dtype, element and part of a step: a bias of 2^-10 steps,
    noise of too few bits, or one that decoding does not subtract again would show."""
    means, variances, elements, bins, ratios = [], [], [], [], []
    for dtype, bits in itertools.product(DTYPES, BITS):
        x = draw(kind, dtype, bits)
        mean, variance, fourth, p = moments(x, bits, rounding)
        ulp = torch.finfo(dtype).eps * x.abs().double()
        # Rounding results to 16 bits shifts a code's value by half an ulp at most, and over codes, of which one bit has
        # few, it averages out.
        bias = mean - x.double()
        assert abs(bias.mean()) <= 0.25 * ulp.mean() + 1e-6 * x.abs().double().max()

        error = decoded(x, bits, rounding, seeds_of(kind, dtype, bits)) - mean
        sure = variance <= 1e-12 * variance.max()
        if rounding == "stochastic":  # the minimum comes back exactly, whatever the noise
            assert (error[:, x.double() == group_metadata(ops.compress(x, bits, GROUP), x, bits, GROUP)[0]] == 0).all()
        assert float(error[:, sure].abs().max() if sure.any() else 0.0) <= 1e-5 * float(variance.max()) ** 0.5
        total, squares = error.sum(0), error.square().sum(0) - SEEDS * variance
        spread = (SEEDS * (fourth - variance.square())).clamp(min=0)
        means.append(total.sum() / (SEEDS * variance.sum()).sqrt())
        variances.append(squares.sum() / spread.sum().sqrt())
        ratios.append(error.square().mean(0).sum() / variance.sum())

        # Element by element: Bernstein's bound holds however rarely an element rounds up.
        log = -torch.tensor(1e-5 / (2 * NUMEL * len(DTYPES) * len(BITS))).log()
        assert (total.abs() <= (2 * SEEDS * variance * log).sqrt() + log / 3 * error.abs().amax(0) + 1e-9).all()
        often = (SEEDS * variance.square() > 25 * (fourth - 3 * variance.square()).abs()) & ~sure
        elements.append((total / (SEEDS * variance).sqrt())[often])
        part = (8 * p).long().clamp(max=7)
        for index in range(8):
            chosen = often & (part == index) & (spread > 0.01 * SEEDS * variance.square())
            if chosen.sum() >= 4:
                bins.append(torch.stack([squares[chosen].sum() / spread[chosen].sum().sqrt()]))
                bins.append(torch.stack([total[chosen].sum() / (SEEDS * variance[chosen].sum()).sqrt()]))
    for scores in (means, variances):
        assert abs(float(torch.stack(scores).sum())) / len(scores) ** 0.5 <= 3
        assert_white(torch.stack(scores))
    assert_white(torch.cat(elements))
    assert_white(torch.cat(bins))
    assert float(torch.stack(ratios).mean()) == pytest.approx(1, abs=0.3 / SEEDS**0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_dither_error_is_uniform_whatever_the_value(kind: str) -> None:
    """Uniform over a step around zero, in every part of a step: noise that is not subtracted exactly would show."""
    for dtype, bits in itertools.product((torch.float32, torch.float64), BITS):
        x = draw(kind, dtype, bits)
        _, step, position = group_metadata(ops.compress(x, bits, GROUP), x, bits, GROUP)
        error = (decoded(x, bits, "dither", seeds_of(kind, dtype, bits)[:500]) - x.double()) / step + 0.5
        assert_uniform(error)
        part = (8 * position.frac()).long()
        for index in part.unique():
            assert_uniform(error[:, part == index])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [-1.7, 0.0, 1e-5, 300.0])
def test_constant_groups_have_no_error(value: float, dtype: torch.dtype) -> None:
    x = torch.full((NUMEL,), value).to(dtype)
    for rounding, bits in itertools.product(("stochastic", "dither", "nearest"), BITS):
        assert (decoded(x, bits, rounding, range(20)) == x.double()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_nearest_errs_by_half_a_step_and_without_noise(kind: str) -> None:
    for dtype, bits in itertools.product(DTYPES, BITS):
        x = draw(kind, dtype, bits)
        _, step, _ = group_metadata(ops.compress(x, bits, GROUP), x, bits, GROUP)
        values = decoded(x, bits, "nearest", range(20))
        assert (values == values[0]).all()
        slack = step * 2.0 ** (bits - 20) + torch.finfo(dtype).eps * (x.double().abs() + step)
        assert ((values[0] - x.double()).abs() <= step / 2 + slack).all()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_rounds_without_bias(kind: str) -> None:
    """16 bits: the variance is that of rounding between the two neighbours, p (1 - p) squared ulps."""
    x = draw(kind, torch.float32, 0) * 1.001  # no zeros but ReLU's
    word = x.view(torch.int32)
    low = (word & ~0xFFFF).view(torch.float32).double()
    high = ((word & ~0xFFFF) + 0x10000).view(torch.float32).double()
    p = (word & 0xFFFF).double() / 0x10000
    variance, fourth = (high - low).square() * p * (1 - p), (high - low) ** 4 * p * (1 - p) * (1 - 3 * p * (1 - p))
    error = (decoded(x, 16, "stochastic", range(SEEDS)) - x.double()) / (high - low).abs()  # in ulps: one scale for all
    variance, fourth = variance / (high - low).square(), fourth / (high - low) ** 4
    total, squares = error.sum(0), error.square().sum(0) - SEEDS * variance
    assert (error[:, p == 0] == 0).all()
    assert abs(total.sum()) <= 3 * (SEEDS * variance.sum()).sqrt()
    assert abs(squares.sum()) <= 3 * (SEEDS * (fourth - variance.square()).sum()).sqrt()
    often = SEEDS * variance > 25
    if COMPILED:
        assert_white((total / (SEEDS * variance).sqrt())[often])
        spread = fourth - variance.square()
        wide = often & (spread > 0.01)
        assert_white((squares / (SEEDS * spread).sqrt())[wide])


# ---- The noise itself --------------------------------------------------------------------------------------------


def recovered_noise(x: torch.Tensor, bits: int, group_size: int, seed: int) -> torch.Tensor:
    """The noise in [0, 1) that a tensor was rounded with, out of subtractive dither's error."""
    blob = ops.compress(x, bits, group_size, seed, None, "dither")
    error = ops.decompress(blob, x.shape, x.dtype, bits, group_size, seed, "dither").double() - x.double()
    _, step, position = group_metadata(blob, x, bits, group_size)
    return (0.5 - error.view(-1) / step - position) % 1


def noise(seeds: Sequence[int], groups: int = 1, size: int = 256) -> torch.Tensor:
    """The exact noise of groups that nothing but their index tells apart, (seeds, groups, size)."""
    x = torch.zeros(groups, size)
    x[:, 0] = 1  # one level, one step
    rows = []
    for seed in seeds:
        blob = ops.compress(x, 1, size, seed, None, "dither")
        rows.append(x + 0.5 - ops.decompress(blob, x.shape, x.dtype, 1, size, seed, "dither"))
    return torch.stack(rows)


def bfloat16_noise(seed: int, upper_bits: torch.Tensor, size: int = 256) -> torch.Tensor:
    """The noise in [0, 1) that rounds at 16 bits, given the elements' upper halves (int32), by bisection."""
    least = torch.zeros_like(upper_bits)  # of the lower halves that round up, found bit by bit
    for bit in reversed(range(16)):
        trial = least + (1 << bit)
        x = (upper_bits << 16 | trial).view(torch.float32)
        back = ops.decompress(ops.compress(x, 16, size, seed), x.shape, x.dtype, 16, size)
        stays = back.view(torch.int32) >> 16 == upper_bits
        least = torch.where(stays, trial, least)
    return (0xFFFF - least) / 0x10000


def test_noise_is_uniform_in_all_its_bits() -> None:
    """22 bits, each fair and none a copy of another: noise of 8 bits, or weak low bits of the product, would show."""
    u = noise(range(64), groups=64).flatten()
    whole = (u.double() * 2**22).long()
    assert torch.equal(whole.double() / 2**22, u.double()) and u.min() >= 0 and u.max() < 1
    assert_uniform(u + 2.0**-23)
    bits = torch.stack([whole >> k & 1 for k in range(22)], 1) * 2.0 - 1
    assert_white(bits.double().sum(0) / u.numel() ** 0.5)
    assert_white(upper(correlations(bits, bits)))


def test_stochastic_and_dither_round_with_the_same_noise() -> None:
    """What stochastic codes say of the noise is what dither subtracts, so that tests of the latter hold for both."""
    x = torch.rand(256, dtype=torch.float64)
    for bits in BITS:
        blob = ops.compress(x, bits, 256, 3)
        assert torch.equal(blob, ops.compress(x, bits, 256, 3, None, "dither"))
        minimum, step, position = group_metadata(blob, x, bits, 256)
        n = recovered_noise(x, bits, 256, 3)
        code = (ops.decompress(blob, x.shape, x.dtype, bits, 256) - minimum) / step
        assert torch.equal(code.round(), (position + n).floor())


@MOMENTS
@pytest.mark.parametrize(("size", "draws"), [(32, 1 << 14), (256, 1 << 15), (1024, 1 << 13)])
def test_elements_of_a_group_are_uncorrelated(
    size: int, draws: int, moment: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """All pairs of elements, then all pairs at one distance together, and squares with plain values. Elements 16, 32
    and 48 apart share a hash: equal or nearby multipliers would show here first."""
    groups = 256
    u = noise(range(draws // groups), groups, size).view(-1, size)
    z = correlations(centred(u), moment(u))
    pairs = upper(z)
    assert_white(pairs)
    by_distance = torch.stack([z.diagonal(d).sum() / (size - d) ** 0.5 for d in range(1, size)])
    assert_white(by_distance)
    critical = [d for d in (1, 16, 32, 48, 64, 128) if d < size]
    assert_white(by_distance[torch.tensor(critical) - 1])
    assert_white(upper(correlations(moment(u), moment(u))))


@pytest.mark.slow
@pytest.mark.parametrize("places", [SHARES, (0, 1, 2, 3), (0, 64, 128, 192)], ids=str)
def test_quadruples_fill_their_space(places: tuple[int, ...]) -> None:
    """Any two, three, four of the elements that share a hash, of neighbours, and of neighbouring hashes: an even
    histogram, sums and differences of the variance that independent ones have, and no small integer combination of
    them that is not uniform (multipliers of one hash put them on a lattice: here is where a coarse one shows)."""
    starts = range(16) if places == SHARES else range(0, 64, 4) if places[1] == 1 else range(64)
    u = noise(range(32), groups=256)
    u = torch.cat([u[:, :, [start + place for place in places]].reshape(-1, 4) for start in starts])
    for count, bins in ((2, 64), (3, 16), (4, 8)):
        for chosen in itertools.combinations(range(4), count):
            assert_even(u[:, chosen], bins)

    rows = u.shape[0]
    signs = torch.tensor([(1, *rest) for rest in itertools.product((1, -1), repeat=3)], dtype=u.dtype)
    for count in (2, 3, 4):
        sums = (u - 0.5)[:, :count] @ signs[:, :count].T * (12 / count) ** 0.5
        # The fourth moment of a sum of `count` uniform ones over the square of its variance is 3 - 6 / (5 count).
        assert_white((sums.square().sum(0) - rows).unique() / (rows * (2 - 1.2 / count)) ** 0.5)

    combinations = [k for k in itertools.product(range(-3, 4), repeat=4) if k > (0, 0, 0, 0)]
    phase = 2 * torch.pi * (u[: 1 << 15] @ torch.tensor(combinations, dtype=u.dtype).T)
    for part in (phase.cos(), phase.sin()):
        assert_white(part.sum(0) * (2 / phase.shape[0]) ** 0.5)


@MOMENTS
@pytest.mark.parametrize("size", [32, 256, 1024])
def test_no_distance_within_a_tensor_is_correlated(size: int, moment: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Groups of identical data, one after the other, as one sequence: its autocorrelation at every distance, hence
    between any elements of any groups, neighbours and powers of two apart alike. Only the group's index tells them
    apart: noise that ignores it would repeat."""
    sequence = moment(noise([7], (1 << 19) // size, size).flatten())
    z = autocorrelations(sequence)
    assert_white(z)
    powers = torch.tensor([1 << k for k in range((sequence.numel() // 2).bit_length() - 1)])
    assert_white(z[powers - 1])
    assert_white(z[size - 1 :: size])


@MOMENTS
def test_groups_of_identical_data_are_uncorrelated(moment: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """All pairs of 256 groups, element by element: adjacent ones, and those whose indices differ in one bit."""
    u = moment(noise(range(64), groups=256)).transpose(0, 1).reshape(256, -1).T
    z = correlations(u, u)
    assert_white(upper(z))
    for bit in range(8):
        first = torch.arange(256)[torch.arange(256) >> bit & 1 == 0]
        assert_white(z[first, first ^ 1 << bit])


def signed(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


SEED_SETS = {
    "adjacent": range(128),
    "around-2^32": range(2**32 - 64, 2**32 + 64),
    "one-bit-apart": [signed(1 << k) for k in range(64)],
    "high-word": [k << 32 for k in range(128)],
    "negative": range(-128, 0),
    "slots": [tensor_seed(0, "0123456789abcdef", f"layers.{k}.addmm") for k in range(128)],
    "slots-of-adjacent-seeds": [tensor_seed(k, "0123456789abcdef", "layers.0.addmm") for k in range(128)],
}


@pytest.mark.slow
@MOMENTS
@pytest.mark.parametrize("name", SEED_SETS)
def test_seeds_and_slots_are_uncorrelated(name: str, moment: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """All pairs of seeds, where their noise meets (same data, same group, same element), and shifted against each
    other: a tensor's noise must not be another one's, nor a piece of it."""
    u = moment(noise(SEED_SETS[name], groups=64)).flatten(1)
    z = correlations(u.T, u.T)
    assert_white(upper(z))
    assert_white(z.diagonal(1))
    assert_white(autocorrelations(u))


def test_bfloat16_noise_is_uniform_and_uncorrelated() -> None:
    """16 bits have a noise of their own; identical elements differ by index, and every upper half draws anew."""
    same = torch.full((1 << 18,), NORMAL_BITS, dtype=torch.int32)
    u = bfloat16_noise(5, same)
    assert_uniform(u + 2.0**-17)
    for moment in (centred, centred_square):
        assert_white(autocorrelations(moment(u)))
    versions = torch.stack([bfloat16_noise(5, same[: 1 << 12] + k) for k in range(32)])
    seeds = torch.stack([bfloat16_noise(k, same[: 1 << 12]) for k in range(32)])
    for rows in (versions, seeds):
        assert_white(upper(correlations(centred(rows.T), centred(rows.T))))


# ---- Successive steps of a training run --------------------------------------------------------------------------


def standardised(x: torch.Tensor, bits: int, rounding: str, seed: int = 1, group_size: int = 256) -> torch.Tensor:
    """Errors over their standard deviations; 0 where that is next to nothing."""
    blob = ops.compress(x, bits, group_size, seed, None, rounding)
    back = ops.decompress(blob, x.shape, x.dtype, bits, group_size, seed, rounding).view(-1).double()
    return _standardised(x, blob, back, bits, rounding, group_size)


def _standardised(
    x: torch.Tensor, blob: torch.Tensor, back: torch.Tensor, bits: int, rounding: str, group_size: int
) -> torch.Tensor:
    _, step, position = group_metadata(blob, x, bits, group_size)
    p = position.frac()
    variance = step.square() * (p * (1 - p) if rounding == "stochastic" else 1 / 12)
    return torch.where(variance > 0.02 * step.square(), (back - x.reshape(-1).double()) / variance.sqrt(), 0.0)


def agreement(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """z-score of the correlation of two rows of standardised errors."""
    return (first * second).sum() / ((first != 0) & (second != 0)).sum().sqrt()


def metadata_bits(x: torch.Tensor, bits: int, group_size: int = 256) -> torch.Tensor:
    """A row of bytes per group: its minimum and step as they are stored."""
    groups, width = x.numel() // group_size, x.element_size()
    stored = ops.compress(x, bits, group_size)[groups * group_size * bits // 8 :]
    return torch.cat([stored[: groups * width].view(groups, width), stored[groups * width :].view(groups, 2)], 1)


@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
@pytest.mark.parametrize("bits", [1, 4])
def test_steps_on_data_that_changes_are_uncorrelated(bits: int, rounding: str) -> None:
    """A float32 tensor that drifts by a thousandth per step: its groups' minima change in every step, and with them the
    noise. Noise of the seed and the index alone would repeat, and errors would add up instead of averaging out."""
    x, drift = torch.randn(64, 256), torch.randn(64, 256)
    errors = []
    for _ in range(40):
        errors.append(standardised(x, bits, rounding))
        x = x - 1e-3 * (drift + torch.randn(64, 256))
    for lag in range(1, 6):
        assert_white(torch.stack([agreement(a, b) for a, b in zip(errors[:-lag], errors[lag:], strict=True)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("what", ["minimum", "step"])
def test_the_least_change_of_metadata_draws_new_noise(what: str, dtype: torch.dtype) -> None:
    """One unit in the last place of the minimum, or one of the stored step: neighbouring metadata, unrelated noise."""
    inner = torch.rand(64, 256, dtype=dtype) * 0.5 + 0.25
    rows = []
    low, high = torch.zeros((), dtype=dtype) - 1, torch.ones((), dtype=dtype)
    for k in range(64):
        x = inner.clone()
        x[:, 7], x[:, 99] = low, high
        rows.append(recovered_noise(x, 2, 256, 5))
        if what == "minimum":
            low = torch.nextafter(low, torch.zeros((), dtype=dtype))
        else:
            high = torch.tensor(-1 + 2 * (1 + (k + 1) / 128), dtype=dtype)
    u = torch.stack(rows)
    for moment in (centred, centred_square):
        assert_white(upper(correlations(moment(u).T, moment(u).T)))
    assert_white(autocorrelations(centred(u)))


def test_data_that_does_not_change_is_rounded_alike() -> None:
    """The same tensor and seed give the same bytes: the noise repeats in every step, and its error does not average
    out over steps. Another seed, or another extreme of a group, gives other noise, to that group alone."""
    x = torch.randn(8, 256)
    blob = ops.compress(x, 2)
    assert torch.equal(blob, ops.compress(x.clone(), 2))
    codes = blob[: 8 * 64].view(8, 64)
    other_seed = ops.compress(x, 2, seed=1)[: 8 * 64].view(8, 64)
    assert (codes != other_seed).any(1).all()
    x[3, x[3].argmin()] = torch.nextafter(x[3].min(), torch.tensor(-9.0))
    other_minimum = ops.compress(x, 2)[: 8 * 64].view(8, 64)
    assert (codes != other_minimum).any(1).nonzero().tolist() == [[3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_group_whose_extremes_stay_keeps_its_noise(dtype: torch.dtype) -> None:
    """However its inner elements move: the noise is of the stored minimum and step, not of the elements. So is that of
    a maximum which moves less than the step's 8 bits tell. Stochastic codes then rise and fall with the elements."""
    x = torch.rand(16, 256, dtype=dtype)
    x[:, 0], x[:, 1] = 0.0, 1 - 2.0**-9
    first = recovered_noise(x, 2, 256, 5)
    moved = x.clone()
    moved[:, 2:] = torch.rand(16, 254, dtype=dtype)
    moved[:, 1] -= 2.0**-12
    assert torch.equal(metadata_bits(x, 2), metadata_bits(moved, 2))
    difference = (first - recovered_noise(moved, 2, 256, 5) + 0.5) % 1 - 0.5
    assert difference.abs().max() < 1e-5
    up = ops.decompress(ops.compress(torch.maximum(x, moved), 2), x.shape, dtype, 2)
    assert (up >= ops.decompress(ops.compress(x, 2), x.shape, dtype, 2)).all()


def test_bfloat16_noise_is_of_the_elements_upper_half() -> None:
    """At 16 bits what bfloat16 keeps of an element takes part, its lower half does not: among values that share an
    upper half, the noise is one and the same, so that greater ones round no lower."""
    upper_bits = torch.full((4096,), NORMAL_BITS, dtype=torch.int32)
    lower = torch.arange(0, 0x10000, 0x800, dtype=torch.int32)
    x = (upper_bits << 16 | lower[:, None]).view(torch.float32)
    rows = torch.stack([ops.decompress(ops.compress(row, 16), row.shape, row.dtype, 16) for row in x])
    assert (rows[1:] >= rows[:-1]).all() and (rows[0] == 1).all()
    assert (bfloat16_noise(0, upper_bits) != bfloat16_noise(0, upper_bits + 1)).float().mean() > 0.99


REPEATS = {  # kind, dtype: bounds on the part of groups that keep their noise, on new batches and after a small step
    ("gaussian", torch.float32): ((0, 0.001), (0, 0.01)),
    ("relu", torch.float32): ((0.002, 0.02), (0.85, 1)),
    ("gaussian", torch.bfloat16): ((0, 0.002), (0.8, 1)),
}


@pytest.mark.parametrize(("kind", "dtype"), REPEATS, ids=str)
def test_how_often_noise_repeats(kind: str, dtype: torch.dtype) -> None:
    """Where the minimum says little (0 after a ReLU; 8 bits of bfloat16), only the step's 8 bits are left to change:
    one group in a hundred meets, in a new batch, the noise that it had in the last one, and on a fixed batch most
    groups keep theirs while activations move by a thousandth per step. In all other groups the noise is new."""
    groups = 2048
    before, change = torch.randn(groups, 256), torch.randn(groups, 256)
    batches = {"new": change, "moved": before + 1e-3 * change}
    activation = torch.relu if kind == "relu" else torch.clone
    old = activation(before).to(dtype)
    for bounds, x in zip(REPEATS[kind, dtype], batches.values(), strict=True):
        x = activation(x).to(dtype)
        kept = (metadata_bits(old, 4) == metadata_bits(x, 4)).all(1)
        assert bounds[0] <= float(kept.float().mean()) <= bounds[1]
        # As float32, whose decoded values are fine enough to tell the noise.
        n, m = (recovered_noise(value.float(), 4, 256, 5).view(groups, 256) for value in (old, x))
        renewed = (metadata_bits(old.float(), 4) != metadata_bits(x.float(), 4)).any(1)
        if renewed.sum() > 8:
            assert_white((centred(n[renewed]) * centred(m[renewed])).sum(1) / 16)
        difference = ((n - m)[~renewed] + 0.5) % 1 - 0.5
        assert difference.numel() == 0 or difference.abs().max() < 1e-5


# ---- Real training runs ------------------------------------------------------------------------------------------


@pytest.fixture
def compressed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], torch.Tensor]]:
    """Arguments and result of every call of compress in graphs that run operator by operator, as they come."""
    calls: list[tuple[tuple[Any, ...], torch.Tensor]] = []
    call_function = GraphInterpreter.call_function

    def spy(self: GraphInterpreter, target: Any, args: Any, kwargs: Any) -> Any:
        result = call_function(self, target, args, kwargs)
        if target is torch.ops.gact_fx.compress.default and args[0].is_floating_point():
            calls.append(((args[0].clone(), *args[1:]), result.clone()))
        return result

    monkeypatch.setattr(GraphInterpreter, "call_function", spy)
    return calls


def slot_errors(call: tuple[tuple[Any, ...], torch.Tensor]) -> torch.Tensor:
    """Standardised errors of a recorded call, in full groups; of widths by place, run after run."""
    (x, *_), blob = call
    code, start = Code.of_compress(call[0]), 0
    assert x.numel() % code.group_size == 0
    by_place = code.by_place or f"{code.bits}x{x.numel() // code.group_size}"
    errors = torch.zeros(x.numel() // code.group_size, code.group_size).unflatten(0, (-1, count_places(by_place)))
    for at, run in enumerate(runs_of(by_place)):
        part = x.reshape(errors.shape)[:, run.first : run.first + run.count]
        of_run = Code(run.bits, code.rounding, code.group_size, code.seed + at)
        stored = blob[start : start + of_run.nbytes(part.numel(), x.dtype)]
        start += len(stored)
        back = ops.decompress(stored, part.shape, x.dtype, *of_run.to_decompress()).view(-1).double()
        found = _standardised(part, stored, back, run.bits, code.rounding, code.group_size)
        errors[:, run.first : run.first + run.count] = found.view(part.shape)
    return errors.view(-1)


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["stochastic", "dither"])
def test_training_steps_and_slots_are_uncorrelated(
    rounding: str, compressed: list[tuple[tuple[Any, ...], torch.Tensor]]
) -> None:
    """Twelve steps of SGD on new batches: the errors of every slot, at lags of 1 to 5 steps, and of the slots with
    each other. Slots that shared a seed, or steps that shared their noise, would show."""
    model = Mixed()
    batches = [(torch.randn(8, 3, 8, 8), torch.randint(0, 10, (8,))) for _ in range(12)]
    # Without recomputation, which leaves fewer slots.
    options: dict[str, Any] = {"recompute": "off", "rounding": rounding, "group_size": 256}
    gact_fx.compile(model, inner="eager", sample_batches=batches[:1], **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compressed.clear()
    steps = []
    for batch in batches:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append([slot_errors(call) for call in compressed])
        seeds = [call[0][3] for call in compressed]
        compressed.clear()
    assert len(set(seeds)) == len(seeds) >= 8
    for lag in range(1, 6):
        pairs = [
            (a, b) for old, new in zip(steps[:-lag], steps[lag:], strict=True) for a, b in zip(old, new, strict=True)
        ]
        assert_white(torch.stack([agreement(a, b) for a, b in pairs]))
    slots = [(a, b) for step in steps for a, b in itertools.combinations(step, 2)]
    assert_white(torch.stack([agreement(*(e[: min(len(a), len(b))] for e in (a, b))) for a, b in slots]))


def test_gradient_noise_of_successive_steps() -> None:
    """What compression adds to the gradient: the cosines between the noise of steps at lags 1 to 3 average to zero,
    over a run on new batches; without updates, one full batch has the same noise in every step, bit for bit."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8))
    exact = copy.deepcopy(model)
    batches = torch.randn(32, 64, 32)

    def loss(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = module(x).square().mean()
        return value

    # Without recomputation: GELU of rounded values is biased at such widths, and a bias is the same in every step.
    options: dict[str, Any] = {"budget_bits": 2, "recompute": "off"}
    gact_fx.compile(model, inner="eager", sample_batches=[batches[0]], loss_fn=loss, **options)
    noises = []
    for x in batches:
        exact.load_state_dict(model.state_dict())
        loss(model, x).backward(), loss(exact, x).backward()
        found, wanted = gradients(model), gradients(exact)
        difference = torch.cat([(a - b).flatten() for a, b in zip(found, wanted, strict=True)])
        noises.append(difference / difference.norm())
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                parameter -= 0.1 * gradient  # type: ignore[misc]
    for lag in range(1, 4):
        cosines = torch.stack([a @ b for a, b in zip(noises[:-lag], noises[lag:], strict=True)])
        assert abs(float(cosines.mean())) <= 4 * float(cosines.std()) / cosines.numel() ** 0.5
        assert cosines.abs().max() < 0.5

    repeated = []
    for _ in range(2):
        loss(model, batches[0]).backward()
        repeated.append(gradients(model))
    for first, second in zip(*repeated, strict=True):
        assert torch.equal(first, second)
