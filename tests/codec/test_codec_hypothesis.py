"""What holds for every input: kernel and reference agree bit by bit, and the codec keeps what it promises."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from gact_fx import ops
from gact_fx.codec import reference
from gact_fx.codec.by_place import count_places, written
from gact_fx.codec.layout import blob_nbytes, group_count

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROUNDINGS = ("stochastic", "dither", "nearest", "rotated")
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
LAYOUTS = ("contiguous", "transposed", "channels_last", "sliced", "rows_with_gaps", "expanded", "unaligned")
GROUP_SIZES = (32, 64, 128, 256, 512, 1024)
SHAPES = ((), (0,), (1,), (5, 0, 3), (31,), (32,), (33,), (255,), (257,), (2, 3, 5, 7), (3, 1025), (2, 16, 9, 11))
needs_kernels = pytest.mark.skipif(not ops.has_compiled_kernels("cpu"), reason="libgact_fx is not built")

LIMIT = {torch.float64: 2.0**125, torch.float32: 2.0**125, torch.bfloat16: 2.0**125, torch.float16: 2.0**14}
KINDS = (
    "normal",
    "offset",
    "relu",
    "constant",
    "minus_zero",
    "subnormal",
    "nan",
    "inf",
    "both",
    "all",
    "huge",
    "mixed",
)


def fill(kind: str, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a 1-D tensor of one kind of values; "mixed" draws a kind per element."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(numel, generator=generator)
    draw = torch.rand(numel, generator=generator)
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    nan, inf = torch.tensor(math.nan), torch.tensor(math.inf)
    values = {
        "normal": normal,
        "offset": normal * 0.01 + 100.0,
        "relu": normal.relu(),
        "constant": torch.full((numel,), -1.7),
        "minus_zero": torch.where(draw < 0.5, -0.0, 0.0),
        "subnormal": normal * tiny * 0.1,
        "nan": torch.where(draw < 0.1, nan, normal),
        "inf": torch.where(draw < 0.1, inf, normal),
        "both": torch.where(draw < 0.1, inf, torch.where(draw > 0.8, -inf, normal)),
        "all": torch.where(draw < 0.3, nan, torch.where(draw > 0.7, inf, -inf)),
        "huge": torch.where(draw < 0.5, -1.0, 1.0).double() * largest * normal.abs().clamp(max=1.0),
    }
    if kind != "mixed":
        return values[kind].to(dtype)
    stacked = torch.stack([value.to(dtype) for value in values.values()])
    # One more level of kinds at random: elements of a few kinds, so that groups without NaN occur as well.
    chosen = torch.randint(len(values), (3,), generator=generator)
    which = chosen[torch.randint(3, (numel,), generator=generator)]
    return stacked[which, torch.arange(numel)]


def relayout(x: torch.Tensor, how: str) -> torch.Tensor:
    """Return a tensor of the same elements in the same logical order, with other strides where the rank allows."""
    if how == "transposed" and x.dim() >= 2:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "channels_last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if how == "rows_with_gaps" and x.dim() >= 2:
        wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 7, dtype=x.dtype)
        wide[..., 3:-4] = x
        return wide[..., 3:-4]
    if how == "expanded" and x.dim() >= 2:  # the same elements again and again: other values, at stride 0
        return x[:1].expand_as(x)
    if how == "unaligned":
        shifted = torch.cat([x.new_zeros(1), x.reshape(-1)])
        return shifted[1:].view(x.shape)
    if how == "sliced" and x.dim() >= 1:
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 1, dtype=x.dtype)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    return x


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    )


def steps_and_irregular(
    blob: torch.Tensor, numel: int, dtype: torch.dtype, bits: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read each element's step (of regular groups; else 0) and whether its group is irregular out of a blob."""
    groups = group_count(numel, group_size)
    offset = groups * (group_size * bits // 8 + dtype.itemsize)
    stored = blob[offset : offset + 2 * groups].clone().view(torch.int16)
    step = torch.where(stored < 0, 0, stored).to(torch.int16).view(torch.bfloat16)
    return tuple(part.repeat_interleave(group_size)[:numel] for part in (step.double(), stored < 0))  # type: ignore[return-value]


shapes = st.sampled_from(SHAPES) | st.lists(st.integers(0, 40), max_size=3).map(tuple)
tensors = {
    "kind": st.sampled_from(KINDS),
    "shape": shapes,
    "layout": st.sampled_from(LAYOUTS),
    "group_size": st.sampled_from(GROUP_SIZES),
    "seed": st.integers(-(2**63), 2**63 - 1),
}
anything = dict(**tensors, dtype=st.sampled_from(DTYPES), bits=st.integers(1, 8))


@needs_kernels
@given(**anything, rounding=st.sampled_from(ROUNDINGS))
def test_kernel_matches_reference(
    kind: str,
    shape: tuple[int, ...],
    layout: str,
    group_size: int,
    seed: int,
    dtype: torch.dtype,
    bits: int,
    rounding: str,
) -> None:
    x = relayout(fill(kind, math.prod(shape), dtype, seed % 1000).view(shape), layout)
    mask = relayout(torch.rand(shape) < 0.4, layout)
    check_against_reference(x, bits, group_size, seed, mask, rounding)


@needs_kernels
@given(**tensors, rounding=st.sampled_from(("stochastic", "nearest")))
def test_bfloat16_matches_reference(
    kind: str, shape: tuple[int, ...], layout: str, group_size: int, seed: int, rounding: str
) -> None:
    x = relayout(fill(kind, math.prod(shape), torch.float32, seed % 1000).view(shape), layout)
    check_against_reference(x, 16, group_size, seed, None, rounding)


@needs_kernels
@pytest.mark.parametrize("size", [2, 3, 4])
def test_more_dimensions_than_the_kernels_walk(size: int) -> None:
    """Ten that cannot be merged: the kernels get a copy, which must live as long as they read it."""
    x = torch.randn([size] * 10).permute(*reversed(range(10)))
    check_against_reference(x, 4, 256, 3, None, "stochastic")


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flushing_subnormals_changes_nothing_in_16_bits(dtype: torch.dtype) -> None:
    """float16's subnormals are float32's normal numbers; a processor told to flush must not lose them."""
    x = torch.cat([torch.full((256,), 2.998e-5), 6e-5 * torch.randn(512), torch.randn(256)]).to(dtype)
    blob = ops.compress(x, 5, 256, 7)
    expected = ops.decompress(blob, x.shape, dtype, 5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the setting is this thread's
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        assert torch.equal(ops.compress(x, 5, 256, 7), blob)
        assert torch.equal(ops.decompress(blob, x.shape, dtype, 5), expected)
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    assert torch.equal(expected[:256], x[:256])


@needs_kernels
@given(
    kind=st.sampled_from(KINDS),
    layout=st.sampled_from(LAYOUTS),
    group_size=st.sampled_from(GROUP_SIZES),
    seed=st.integers(0, 2**63 - 1),
    dtype=st.sampled_from(DTYPES),
    rounding=st.sampled_from(ROUNDINGS),
    rows=st.integers(0, 5),
    widths=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 3)), min_size=1, max_size=4),
    has_mask=st.booleans(),
)
def test_widths_by_place_match_reference(
    kind: str,
    layout: str,
    group_size: int,
    seed: int,
    dtype: torch.dtype,
    rounding: str,
    rows: int,
    widths: list[tuple[int, int]],
    has_mask: bool,
) -> None:
    by_place = written(widths)
    shape = (rows, count_places(by_place) * group_size)
    x = relayout(fill(kind, math.prod(shape), dtype, seed % 1000).view(shape), layout)
    mask = torch.rand(shape) < 0.4 if has_mask else None
    check_against_reference(x, 1, group_size, seed, mask, rounding, by_place)


def check_against_reference(
    x: torch.Tensor,
    bits: int,
    group_size: int,
    seed: int,
    mask: torch.Tensor | None,
    rounding: str,
    by_place: str = "",
) -> None:
    """Zero differing bytes between the compiled kernels and PyTorch code, both ways."""
    code = (bits, group_size, seed)
    blob = torch.ops.gact_fx.compress(x, *code, mask, rounding, by_place)
    assert torch.equal(blob, reference.compress(x, *code, mask, rounding, by_place))
    mask_numel = 0 if mask is None else mask.numel()
    assert blob.shape == (blob_nbytes(x.numel(), x.dtype, bits, group_size, mask_numel, by_place),)
    decoded = torch.ops.gact_fx.decompress(blob, x.shape, x.dtype, *code, rounding, by_place)
    assert decoded.is_contiguous()
    assert same_bits(decoded, reference.decompress(blob, x.shape, x.dtype, *code, rounding, by_place))
    if by_place:
        whole = reference.compress_whole(x, *code, mask, rounding, by_place)
        assert torch.equal(blob, whole)
        assert same_bits(decoded, reference.decompress_whole(whole, x.shape, x.dtype, *code, rounding, by_place))


@needs_kernels
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(each, marks=[] if each in DTYPES[:2] else pytest.mark.slow) for each in DTYPES],
    ids=str,
)
def test_kernel_matches_reference_everywhere(dtype: torch.dtype) -> None:
    """Every width, group size, rounding and kind of values, with tails; also run once per instruction set."""
    for group_size in GROUP_SIZES:
        for bits in (*range(1, 9), *((16,) if dtype == torch.float32 else ())):
            pieces = [fill(kind, 2 * group_size, dtype, bits) for kind in KINDS]
            x = torch.cat([*pieces, fill("normal", group_size // 2 + 5, dtype, bits)])
            for rounding in ROUNDINGS:
                if bits <= 8 or rounding in ("stochastic", "nearest"):
                    check_against_reference(x, bits, group_size, 7, torch.rand(7777) < 0.5, rounding)
                if bits <= 8:
                    rows = x[: 2 * len(KINDS) * group_size]
                    check_against_reference(rows, 1, group_size, 7, None, rounding, f"{bits} 1 2 {bits}")


@given(shape=shapes, layout=st.sampled_from(LAYOUTS), dtype=st.sampled_from(INTEGERS), bits=st.integers(1, 16))
def test_integers_are_exact(shape: tuple[int, ...], layout: str, dtype: torch.dtype, bits: int) -> None:
    largest = min(2**bits - 1, torch.iinfo(dtype).max)
    values = relayout(torch.randint(0, largest + 1, shape).to(dtype), layout)
    blob = ops.compress(values, bits)
    assert torch.equal(blob, reference.compress(values, bits, 256, 0))
    for module in (torch.ops.gact_fx, reference):
        assert same_bits(
            module.decompress(blob, shape, dtype, bits, 256), values.clone(memory_format=torch.contiguous_format)
        )


@given(**anything, rounding=st.sampled_from(ROUNDINGS[:3]))
def test_error_is_bounded(
    kind: str,
    shape: tuple[int, ...],
    layout: str,
    group_size: int,
    seed: int,
    dtype: torch.dtype,
    bits: int,
    rounding: str,
) -> None:
    x = relayout(fill(kind, math.prod(shape), dtype, seed % 1000).view(shape), layout)
    blob = ops.compress(x, bits, group_size, seed, None, rounding)
    decoded = ops.decompress(blob, shape, dtype, bits, group_size, seed, rounding).view(-1)
    x = x.reshape(-1)
    step, irregular = steps_and_irregular(blob, x.numel(), dtype, bits, group_size)

    for first in range(0, x.numel(), group_size):
        group = x[first : first + group_size]
        expected = not bool((group.abs() < LIMIT[dtype]).all())
        assert irregular[first].item() == expected
        if expected or (rounding == "dither" and group.min() < group.max()):
            continue
        low = group == group.min()
        assert torch.equal(decoded[first : first + group_size][low], group[low])  # -0.0 equals 0.0

    error = (decoded.double() - x.double()).abs()
    # Rounding the result to the source's dtype, and float32's rounding in between.
    magnitude = torch.maximum(decoded.double().abs(), x.double().abs())
    slack = 2 * magnitude * torch.finfo(dtype).eps + torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    largest = step if rounding == "stochastic" else step / 2
    assert (error <= largest * (1 + 2.0 ** (bits - 20)) + slack)[~irregular].all()
    finite = x.isfinite()
    assert torch.equal(decoded.isfinite(), finite)  # never a silent finite value, nor a new non-finite one
    if bits > 1:
        assert torch.equal(decoded[~finite].nan_to_num(3.0, 2.0, 1.0), x[~finite].nan_to_num(3.0, 2.0, 1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_irregular_groups(dtype: torch.dtype, bits: int) -> None:
    """Finite values next to non-finite ones stay within a step of the range that the finite ones span."""
    x = torch.randn(64).to(dtype)
    x[5], x[9], x[13] = math.nan, math.inf, -math.inf
    finite = x.isfinite()
    decoded = ops.decompress(ops.compress(x, bits, 64), x.shape, dtype, bits, 64)
    span = float(x[finite].max() - x[finite].min())
    # One bit: all kinds merge into NaN and one level remains; two bits: three kinds leave one level. Both: the minimum.
    levels = 2**bits - (1 if bits == 1 else 3)
    if levels == 1:
        assert torch.equal(decoded[finite], x[finite].min().expand(61))
    else:
        assert (decoded[finite].double() - x[finite].double()).abs().max() <= span / (levels - 1) * 1.08
    if bits == 1:
        assert decoded[~finite].isnan().all()
    else:
        assert decoded[5].isnan() and decoded[9] == math.inf and decoded[13] == -math.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", range(1, 9))
def test_extremes_stay_finite(dtype: torch.dtype, bits: int) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([-largest, largest, 0.0, largest / 2], dtype=torch.float64).to(dtype).repeat(16)
    decoded = ops.decompress(ops.compress(x, bits, 32), x.shape, dtype, bits, 32)
    assert decoded.isfinite().all()
    assert (decoded[::4] == -largest).all()
    assert bits == 1 or (decoded[1::4] >= largest * 0.35).all()  # two bits: the level below the last


@given(
    shape=shapes,
    layout=st.sampled_from(LAYOUTS),
    with_values=st.booleans(),
    density=st.floats(0, 1),
)
def test_masks_are_exact(shape: tuple[int, ...], layout: str, with_values: bool, density: float) -> None:
    mask = relayout(torch.rand(shape) < density, layout)
    blob = ops.compress(torch.randn(77), 3, 32, 0, mask) if with_values else ops.compress(mask, 1)
    assert torch.equal(ops.decompress(blob, shape, torch.bool, 1), mask)
    assert torch.equal(reference.decompress(blob, shape, torch.bool, 1, 256), mask)
    # As bytes, of which any nonzero one is true, the same blob.
    numbers = mask.to(torch.uint8) * 3
    for module in (ops, reference):
        assert torch.equal(module.compress(numbers, 1, 256, 0, None), ops.compress(mask, 1))
    for module in (ops, reference):
        assert torch.equal(module.decompress(blob, shape, torch.uint8, 1, 256), mask.to(torch.uint8))


@pytest.mark.parametrize(
    "module", [reference, pytest.param(torch.ops.gact_fx, marks=needs_kernels)], ids=["reference", "op"]
)
def test_unaligned_and_strided_blobs(module: object) -> None:
    x = torch.randn(1000)
    blob = ops.compress(x, 3, 64, 1)
    expected = ops.decompress(blob, x.shape, x.dtype, 3, 64)
    for offset in (1, 2, 3):
        shifted = torch.cat([torch.zeros(offset, dtype=torch.uint8), blob])[offset:]
        assert torch.equal(module.decompress(shifted, x.shape, x.dtype, 3, 64), expected)  # type: ignore[attr-defined]
    strided = torch.stack([blob, blob], dim=1)[:, 0]
    assert torch.equal(module.decompress(strided, x.shape, x.dtype, 3, 64), expected)  # type: ignore[attr-defined]


def test_reference_over_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, mask = torch.randn(9999), torch.rand(9999) < 0.5
    whole = reference.compress(x, 5, 64, 3, mask)
    monkeypatch.setattr(reference, "_CHUNK", 1024)
    assert torch.equal(whole, reference.compress(x, 5, 64, 3, mask))
    assert torch.equal(
        ops.decompress(whole, x.shape, x.dtype, 5, 64), reference.decompress(whole, x.shape, x.dtype, 5, 64)
    )
    assert torch.equal(reference.decompress(whole, x.shape, torch.bool, 1, 64), mask)
