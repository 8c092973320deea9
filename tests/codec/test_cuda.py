"""The CUDA kernels on a GPU: the reference's bits, on the current stream, without waiting for the device."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import codec_inputs
import hypothesis.strategies as st
import pytest
import torch
from codec_inputs import KINDS
from hypothesis import given, settings

from gact_fx import ops
from gact_fx.codec import reference
from gact_fx.codec.by_place import count_places

needs_kernels = pytest.mark.skipif(
    not (torch.cuda.is_available() and ops.has_compiled_kernels("cuda")),
    reason="there is no GPU, or libgact_fx is built without CUDA kernels",
)
pytestmark = [pytest.mark.cuda, needs_kernels]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
ROUNDINGS = ("stochastic", "dither", "nearest", "rotated")
GROUP_SIZES = (32, 64, 128, 256, 512, 1024)
compress, decompress = torch.ops.gact_fx.compress, torch.ops.gact_fx.decompress


def inputs(numel: int, dtype: torch.dtype, seed: int, kinds: Sequence[str] = KINDS) -> torch.Tensor:
    """Return a 1-D tensor on the CPU, of whose stretches of 32 elements each is of one of ``kinds``."""
    return codec_inputs.inputs(numel // 32 + 1, 32, dtype, seed, kinds)[:numel]


def check(x: torch.Tensor, bits: int, group_size: int, seed: int, rounding: str, mask: torch.Tensor | None) -> None:
    """Compare with the reference for a tensor on the GPU, of any strides."""
    blob = compress(x, bits, group_size, seed, mask, rounding)
    mask_on_cpu = None if mask is None else mask.cpu()
    expected = reference.compress(x.cpu(), bits, group_size, seed, mask_on_cpu, rounding)
    assert torch.equal(blob.cpu(), expected)
    values = decompress(blob, x.shape, x.dtype, bits, group_size, seed, rounding)
    exact = reference.decompress(expected, x.shape, x.dtype, bits, group_size, seed, rounding)
    assert values.is_contiguous()
    assert torch.equal(values.cpu().view(-1).view(torch.uint8), exact.view(-1).view(torch.uint8))
    if mask is not None:
        assert torch.equal(decompress(blob, mask.shape, torch.bool, 1, group_size), mask)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_width_and_group_size(dtype: torch.dtype, rounding: str) -> None:
    x = inputs(100_003, dtype, 1)
    for group_size in GROUP_SIZES:
        for bits in (*range(1, 9), *((16,) if dtype == torch.float32 and rounding != "dither" else ())):
            check(x.cuda(), bits, group_size, 7 << 33 | bits, rounding, None)


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    shape=st.lists(st.integers(0, 40), max_size=4).map(tuple) | st.integers(0, 70_000).map(lambda n: (n,)),
    layout=st.sampled_from(("contiguous", "transposed", "channels_last", "every_other", "rows", "shifted")),
    dtype=st.sampled_from(FLOATS),
    bits=st.integers(1, 8),
    group_size=st.sampled_from(GROUP_SIZES),
    rounding=st.sampled_from(ROUNDINGS),
    seed=st.integers(-(2**63), 2**63 - 1),
    with_mask=st.booleans(),
)
# Fewer than a profile has: up to 2.6 million elements of each go through the reference on the CPU.
@settings(max_examples=300)
def test_kernels_match_reference(
    kinds: list[str],
    shape: tuple[int, ...],
    layout: str,
    dtype: torch.dtype,
    bits: int,
    group_size: int,
    rounding: str,
    seed: int,
    with_mask: bool,
) -> None:
    x = relayout(inputs(math.prod(shape), dtype, seed % 1000, kinds).view(shape).cuda(), layout)
    mask = relayout(torch.rand(shape, device="cuda") < 0.4, layout) if with_mask else None
    check(x, bits, group_size, seed, rounding, mask)


def relayout(x: torch.Tensor, how: str) -> torch.Tensor:
    """Return a tensor of the same elements in the same logical order, with other strides where the rank allows."""
    if how == "transposed" and x.dim() >= 2:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "channels_last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if x.dim() == 0:
        return x
    length = x.shape[-1]
    if how == "every_other":
        view = x.new_zeros(*x.shape[:-1], 2 * length + 1)[..., 1::2]
    elif how == "rows":
        view = x.new_zeros(*x.shape[:-1], length + 8)[..., 4 : 4 + length]
    elif how == "shifted":
        view = x.new_zeros(x.numel() + 1)[1:].view(x.shape)
    else:
        return x
    return view.copy_(x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_widths_by_place(dtype: torch.dtype) -> None:
    """Of one row and of many, and more runs than a kernel takes."""
    for by_place in ("8 4x2 2x13", "1x3 8 5x60", " ".join(["2", "7x2"] * 40)):
        for rows, group_size in ((1, 32), (37, 64), (3, 256)):
            x = inputs(rows * count_places(by_place) * group_size, dtype, 3)
            for rounding in ROUNDINGS:
                code = (1, group_size, 5 << 40)
                blob = compress(x.cuda(), *code, None, rounding, by_place)
                assert torch.equal(blob.cpu(), reference.compress(x, *code, None, rounding, by_place))
                values = decompress(blob, x.shape, dtype, *code, rounding, by_place).cpu()
                exact = reference.decompress(blob.cpu(), x.shape, dtype, *code, rounding, by_place)
                assert torch.equal(values.view(torch.uint8), exact.view(torch.uint8))


def test_unaligned_blobs() -> None:
    x = inputs(10_007, torch.float32, 2)
    for bits in (3, 8, 16):
        expected = reference.compress(x, bits, 64, 1)
        for offset in range(1, 9):
            shifted = torch.cat([expected.new_zeros(offset), expected]).cuda()[offset:]
            values = decompress(shifted, x.shape, x.dtype, bits, 64).cpu()
            exact = reference.decompress(expected, x.shape, x.dtype, bits, 64)
            assert torch.equal(values.view(torch.uint8), exact.view(torch.uint8))


@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers(dtype: torch.dtype, bits: int) -> None:
    largest = min(2**bits, torch.iinfo(dtype).max + 1)
    for numel in (0, 1, 255, 256, 257, 123_457):
        x = torch.randint(0, largest, (numel + 1,)).to(dtype)[1:]
        packed = compress(x.cuda(), bits, 256, 0)
        assert torch.equal(packed.cpu(), reference.compress(x, bits, 256, 0))
        assert torch.equal(decompress(packed, x.shape, dtype, bits, 256).cpu(), x)


@pytest.mark.parametrize(("dtype", "wrong"), [("int8", -1), ("int16", -1), ("int32", 8), ("int64", 2**40)])
def test_integers_out_of_range_raise_an_assertion(dtype: str, wrong: int) -> None:
    """In a process of its own, whose CUDA context does not outlive it."""
    program = f"""
import torch, gact_fx.ops
x = torch.zeros(1000, dtype=torch.{dtype}, device="cuda")
x[777] = {wrong}
gact_fx.ops.compress(x, 3)
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "integers must lie in" in done.stdout + done.stderr


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_opcheck(rounding: str) -> None:
    x, mask = torch.randn(3, 100, device="cuda"), torch.rand(77, device="cuda") < 0.5
    blob = compress(x, 4, 64, 3, mask, rounding)
    torch.library.opcheck(compress.default, (x, 4, 64, 3, mask, rounding))
    torch.library.opcheck(decompress.default, (blob, [3, 100], torch.float32, 4, 64, 3, rounding))
    torch.library.opcheck(decompress.default, (blob, [77], torch.bool, 1, 64))


@pytest.fixture
def no_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def round_trip(x: torch.Tensor, mask: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Run every kernel once: floats, bfloat16 codes, masks and integers, there and back."""
    blob = compress(x, 5, 128, 1, mask, "dither")
    halves = compress(x, 16, 128, 1)
    packed = compress(numbers, 11, 256, 0)
    return (
        blob,
        halves,
        packed,
        decompress(blob, x.shape, x.dtype, 5, 128, 1, "dither"),
        decompress(blob, mask.shape, torch.bool, 1, 128),
        decompress(halves, x.shape, x.dtype, 16, 128),
        decompress(packed, numbers.shape, numbers.dtype, 11, 256),
    )


def arguments(seed: int, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(70, 1001, generator=generator, device=device)
    mask = torch.rand(5000, generator=generator, device=device) < 0.5
    return x, mask, torch.randint(0, 2048, (3333,), generator=generator, device=device)


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_does_not_synchronize(no_synchronization: None) -> None:
    round_trip(*arguments(1))


def test_runs_on_the_current_stream() -> None:
    x, mask, numbers = arguments(2)
    expected = round_trip(x, mask, numbers)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # cycles: a kernel on another stream would read zeros
        late.copy_(x)
        found = round_trip(late, mask, numbers)
    side.synchronize()
    assert same(found, expected)


def test_captured_in_a_graph() -> None:
    static = arguments(3)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        round_trip(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = round_trip(*static)
    for seed in (4, 5):
        for argument, value in zip(static, arguments(seed), strict=True):
            argument.copy_(value)
        graph.replay()
        assert same(captured, round_trip(*arguments(seed)))


def test_compiled_with_cuda_graphs() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        blob = compress(x * 2, 4, 256, 9)
        return torch.as_tensor(decompress(blob, x.shape, x.dtype, 4, 256)).sum(0)

    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(function, mode="reduce-overhead")
    for seed in range(4):
        x = arguments(seed)[0]
        torch.testing.assert_close(compiled(x).clone(), function(x))


def test_on_a_device_that_is_not_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
    x = torch.randn(1000)
    with torch.cuda.device(0):
        blob = compress(x.to("cuda:1"), 4, 64, 1)
    assert torch.equal(blob.cpu(), reference.compress(x, 4, 64, 1))


def test_more_than_two_to_the_31_elements() -> None:
    numel = 2**31 + 2**20 + 77
    if torch.cuda.mem_get_info()[0] < 6 * numel:
        pytest.skip("the GPU has too little memory free")
    x = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    tail = inputs(2**20, torch.bfloat16, 6)
    x[-(2**20) :] = tail.cuda()
    blob = compress(x, 2, 256, 1, None, "nearest")  # without noise, groups do not depend on where they are
    del x
    values = decompress(blob, (numel,), torch.bfloat16, 2, 256, 1, "nearest")
    assert not values[: 2**31].any()
    # From the start of the group that the tail begins in.
    last = values[(numel - 2**20) // 256 * 256 :]
    padded = torch.cat([torch.zeros(last.numel() - 2**20, dtype=torch.bfloat16), tail])
    expected = reference.compress(padded, 2, 256, 1, None, "nearest")
    exact = reference.decompress(expected, padded.shape, torch.bfloat16, 2, 256, 1, "nearest")
    assert torch.equal(last.cpu().view(torch.uint8), exact.view(torch.uint8))
