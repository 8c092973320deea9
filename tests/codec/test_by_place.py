"""Widths by place: how they are written, and what a blob with them is made of."""

import pytest
import torch

from gact_fx import ops
from gact_fx.codec.by_place import Run, count_places, mean_bits, picture, runs_of, written
from gact_fx.codec.code import Code
from gact_fx.errors import UsageError


def test_a_blob_is_the_blobs_of_its_runs() -> None:
    x, mask = torch.randn(5, 6 * 64), torch.rand(77) < 0.5
    blob = ops.compress(x, 2, 64, 7, mask, "dither", "8x2 2x2 4x2")
    parts = [
        ops.compress(x[:, :128], 8, 64, 7, None, "dither"),
        ops.compress(x[:, 128:256], 2, 64, 8, None, "dither"),
        ops.compress(x[:, 256:], 4, 64, 9, None, "dither"),
        ops.compress(mask, 1, 64),
    ]
    assert torch.equal(blob, torch.cat(parts))
    assert torch.equal(ops.decompress(blob, mask.shape, torch.bool, 2, 64), mask)
    assert len(blob) == Code(2, "dither", 64, 7, "8x2 2x2 4x2").nbytes(x.numel(), x.dtype, mask.numel())


def test_wider_places_have_less_noise() -> None:
    x = torch.randn(64, 4 * 128)
    code = Code(2, "dither", 128, 3, "8 2x3")
    found = ops.decompress(ops.compress(x, *code.to_compress()), x.shape, x.dtype, *code.to_decompress())
    errors = (found - x).view(64, 4, 128).square().mean((0, 2))
    assert errors[0] < 1e-3 * errors[1:].min()
    assert errors[1:].max() < 2 * errors[1:].min()


def test_widths_are_written_run_by_run() -> None:
    by_place = written([(8, 1), (4, 1), (4, 1), (2, 1)])
    assert by_place == "8 4x2 2"
    assert runs_of(by_place) == (Run(0, 1, 8), Run(1, 2, 4), Run(3, 1, 2))
    assert (count_places(by_place), mean_bits(by_place)) == (4, 4.5)
    assert (written([]), runs_of(""), count_places("")) == ("", (), 0)


@pytest.mark.parametrize("text", ["9", "0x3", "4y2", "4x", "4x0", "x2", "44", "4 ", " 4", "4  2", "4x-1"])
def test_what_is_not_written_so_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="by_place must be like"):
        runs_of(text)
    if ops.has_compiled_kernels("cpu"):
        with pytest.raises(ValueError, match="by_place must be like"):
            torch.ops.gact_fx.compress(torch.zeros(128), 4, 32, 0, None, "dither", text)


def test_a_picture_is_small() -> None:
    assert picture("8 4 2 1") == "█▄▂▁"
    assert picture("8x240 2x720") == "█" * 6 + "▂" * 18
    assert picture("") == ""
