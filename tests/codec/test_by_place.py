"""Widths by place: how they are written, and what a blob with them is made of."""

import pytest
import torch

from gact_fx import ops
from gact_fx.codec.by_place import Run, mean_bits, picture, runs_of, shortened, spelled_out
from gact_fx.codec.code import Code
from gact_fx.errors import UsageError


def test_a_blob_is_the_blobs_of_its_runs() -> None:
    x, mask = torch.randn(5, 6 * 64), torch.rand(77) < 0.5
    blob = ops.compress(x, 2, 64, 7, mask, "dither", "882244")
    parts = [
        ops.compress(x[:, :128], 8, 64, 7, None, "dither"),
        ops.compress(x[:, 128:256], 2, 64, 8, None, "dither"),
        ops.compress(x[:, 256:], 4, 64, 9, None, "dither"),
        ops.compress(mask, 1, 64),
    ]
    assert torch.equal(blob, torch.cat(parts))
    assert torch.equal(ops.decompress(blob, mask.shape, torch.bool, 2, 64), mask)
    assert len(blob) == Code(2, "dither", 64, 7, "882244").nbytes(x.numel(), x.dtype, mask.numel())


def test_wider_places_have_less_noise() -> None:
    x = torch.randn(64, 4 * 128)
    found = ops.decompress(
        ops.compress(x, 2, 128, 3, None, "dither", "8222"), x.shape, x.dtype, 2, 128, 3, "dither", "8222"
    )
    errors = (found - x).view(64, 4, 128).square().mean((0, 2))
    assert errors[0] < 1e-3 * errors[1:].min()
    assert errors[1:].max() < 2 * errors[1:].min()


@pytest.mark.parametrize("by_place", ["", "4", "8442", "1" * 300 + "8", "12345678"])
def test_digits_are_saved_in_short(by_place: str) -> None:
    assert spelled_out(shortened(by_place)) == by_place
    assert shortened("8442") == "8 4x2 2"
    assert list(runs_of("8442")) == [Run(0, 1, 8), Run(1, 2, 4), Run(3, 1, 2)]


@pytest.mark.parametrize("short", ["9", "0x3", "4y2", "4x", "x2", "44"])
def test_what_is_no_such_text_is_refused(short: str) -> None:
    with pytest.raises(UsageError, match="widths by place must be like"):
        spelled_out(short)


def test_a_picture_is_small() -> None:
    assert picture("8421") == "█▄▂▁"
    assert picture("8" * 240 + "2" * 720) == "█" * 6 + "▂" * 18
    assert picture("") == ""
    assert mean_bits("8422") == 4
