"""The CUDA sources, compiled for the CPU with lanes as fibers, against the reference, bit by bit: no GPU is needed."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from codec_inputs import KINDS, inputs
from hypothesis import given
from test_cuda import arguments, round_trip

from gact_fx.codec import reference
from gact_fx.codec.by_place import count_places, runs_of, written
from gact_fx.codec.layout import blob_nbytes, group_count, metadata_nbytes

ROOT = Path(__file__).parents[2]
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-fno-strict-aliasing", "-Wno-unknown-pragmas")
SOURCES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # in the order of gact::Source
ROUNDINGS = ("stochastic", "dither", "nearest", "rotated")  # in the order of gact::Rounding
GROUP_SIZES = (32, 64, 128, 256, 512, 1024)
INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)
GUARD = 64  # bytes around what a kernel writes
UNTOUCHED = 0xA5


class Emulation:
    """The kernels behind tests/cuda_emulation/emulate.cpp, on tensors."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        names = ("compress", "decompress", "compress_runs", "decompress_runs", "pack_integers", "unpack_integers")
        for name in (*names, "disagree"):
            getattr(self._library, name).restype = ctypes.c_char_p
        self._library.reads.restype = ctypes.c_bool

    def reads(self, x: torch.Tensor) -> bool:
        return bool(self._library.reads(*_strided(x), _enum(SOURCES, x.dtype)))

    def compress(
        self, x: torch.Tensor, bits: int, group_size: int, seed: int, rounding: str, offset: int = 0
    ) -> torch.Tensor:
        """Return the blob, which lies ``offset`` bytes behind an aligned address."""
        nbytes = blob_nbytes(x.numel(), x.dtype, bits, group_size)

        def call(blob: int) -> bytes | None:
            sections = _sections(blob, x.numel(), x.dtype, bits, group_size)
            codec = _codec(x.dtype, rounding, bits, group_size, seed)
            message: bytes | None = self._library.compress(*_strided(x), *codec, *sections)
            return message

        return _write(nbytes, offset, call)

    def decompress(
        self,
        blob: torch.Tensor,
        numel: int,
        dtype: torch.dtype,
        bits: int,
        group_size: int,
        seed: int,
        rounding: str,
        offset: int = 0,
    ) -> torch.Tensor:
        """Return the elements, 1-D; they lie ``offset`` elements behind an aligned address."""

        def call(values: int) -> bytes | None:
            sections = _sections(blob.data_ptr(), numel, dtype, bits, group_size)
            codec = _codec(dtype, rounding, bits, group_size, seed)
            message: bytes | None = self._library.decompress(_pointer(values), ctypes.c_int64(numel), *codec, *sections)
            return message

        return _write(numel * dtype.itemsize, offset * dtype.itemsize, call).view(dtype)

    def compress_by_place(
        self, x: torch.Tensor, group_size: int, seed: int, rounding: str, by_place: str, offset: int = 0
    ) -> torch.Tensor:
        """The blobs of the runs, one behind the other, ``offset`` bytes behind an aligned address."""
        nbytes = blob_nbytes(x.numel(), x.dtype, 1, group_size, by_place=by_place)

        def call(blob: int) -> bytes | None:
            runs = _runs(blob, x.numel(), x.dtype, group_size, seed, rounding, by_place)
            message: bytes | None = self._library.compress_runs(_pointer(x.data_ptr()), *runs)
            return message

        return _write(nbytes, offset, call)

    def decompress_by_place(
        self, blob: torch.Tensor, x: torch.Tensor, group_size: int, seed: int, rounding: str, by_place: str
    ) -> torch.Tensor:
        """The elements, as many and of the dtype as ``x`` has, 1-D."""

        def call(values: int) -> bytes | None:
            runs = _runs(blob.data_ptr(), x.numel(), x.dtype, group_size, seed, rounding, by_place)
            message: bytes | None = self._library.decompress_runs(_pointer(values), *runs)
            return message

        return _write(x.nbytes, 0, call).view(x.dtype)

    def pack_integers(self, x: torch.Tensor, bits: int, is_mask: bool = False, offset: int = 0) -> torch.Tensor:
        def call(packed: int) -> bytes | None:
            value_bits = min(bits, 8 * x.element_size() - (x.dtype != torch.uint8))
            widths = (x.element_size(), bits, value_bits)
            arguments = (_pointer(x.data_ptr()), *widths, is_mask, ctypes.c_int64(x.numel()))
            message: bytes | None = self._library.pack_integers(*arguments, _pointer(packed))
            return message

        return _write(blob_nbytes(x.numel(), torch.int64, bits, 256), offset, call)

    def unpack_integers(
        self, packed: torch.Tensor, numel: int, dtype: torch.dtype, bits: int, offset: int = 0
    ) -> torch.Tensor:
        def call(values: int) -> bytes | None:
            arguments = (_pointer(packed.data_ptr()), dtype.itemsize, bits, ctypes.c_int64(numel))
            message: bytes | None = self._library.unpack_integers(*arguments, _pointer(values))
            return message

        return _write(numel * dtype.itemsize, offset * dtype.itemsize, call).view(dtype)

    def disagree(self, end: bool) -> str:
        message: bytes = self._library.disagree(end)
        return message.decode()


def _pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def _enum(values: Sequence[object], value: object) -> int:
    return values.index(value)


def _strided(x: torch.Tensor) -> tuple[object, ...]:
    """Return data, numel, rank, sizes, strides; a contiguous tensor as one dimension, or none."""
    dims = [(x.numel(), 1)] if x.is_contiguous() else list(zip(x.shape, x.stride(), strict=True))
    dims = [(size, stride) for size, stride in dims if size != 1]
    array = ctypes.c_int64 * len(dims)
    sizes, strides = array(*(size for size, _ in dims)), array(*(stride for _, stride in dims))
    return _pointer(x.data_ptr()), ctypes.c_int64(x.numel()), len(dims), sizes, strides


def _codec(dtype: torch.dtype, rounding: str, bits: int, group_size: int, seed: int) -> tuple[object, ...]:
    codes = (_enum(SOURCES, dtype), _enum(ROUNDINGS, rounding), bits, group_size)
    return *codes, ctypes.c_uint64(seed % 2**64)


def _sections(blob: int, numel: int, dtype: torch.dtype, bits: int, group_size: int) -> tuple[ctypes.c_void_p, ...]:
    groups = group_count(numel, group_size)
    minimum = blob + groups * group_size * bits // 8
    step = minimum + (groups * dtype.itemsize if metadata_nbytes(dtype, bits) else 0)
    return _pointer(blob), _pointer(minimum), _pointer(step)


def _runs(
    blob: int, numel: int, dtype: torch.dtype, group_size: int, seed: int, rounding: str, by_place: str
) -> tuple[object, ...]:
    """Return rows, groups of a row, the codec; of every run where it begins, its length, width and sections."""
    places, runs = count_places(by_place), runs_of(by_place)
    rows = numel // (places * group_size)
    sections: list[ctypes.c_void_p] = []
    for run in runs:
        run_numel = rows * run.count * group_size
        sections += _sections(blob, run_numel, dtype, run.bits, group_size)
        blob += blob_nbytes(run_numel, dtype, run.bits, group_size)
    longs, ints = ctypes.c_int64 * len(runs), ctypes.c_int * len(runs)
    return (
        ctypes.c_int64(rows),
        ctypes.c_int64(places),
        _enum(SOURCES, dtype),
        _enum(ROUNDINGS, rounding),
        group_size,
        ctypes.c_uint64(seed % 2**64),
        len(runs),
        longs(*(run.first for run in runs)),
        longs(*(run.count for run in runs)),
        ints(*(run.bits for run in runs)),
        (ctypes.c_void_p * len(sections))(*(section.value for section in sections)),
    )


def _write(nbytes: int, offset: int, call: Callable[[int], bytes | None]) -> torch.Tensor:
    """Return the bytes that ``call`` writes behind an address, and check that it writes no others."""
    memory = torch.full((GUARD + offset + nbytes + GUARD,), UNTOUCHED, dtype=torch.uint8)
    first = GUARD + offset
    message = call(memory.data_ptr() + first)
    if message:
        raise RuntimeError(message.decode())
    assert (memory[:first] == UNTOUCHED).all()
    assert (memory[first + nbytes :] == UNTOUCHED).all()
    return memory[first : first + nbytes].clone()


@pytest.fixture(scope="session")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("emulation")
    here = Path(__file__).parent / "cuda_emulation"
    objects = []
    for source in (*sorted((ROOT / "csrc/cuda").glob("*.cu")), here / "emulate.cpp"):
        checks = ["-fsanitize=alignment"] if source.suffix == ".cu" else []
        objects.append(folder / f"{source.stem}.o")
        command: list[str | Path] = [
            compiler,
            *FLAGS,
            *checks,
            "-I",
            here,
            "-x",
            "c++",
            "-c",
            source,
            "-o",
            objects[-1],
        ]
        subprocess.run(command, check=True)
    library = folder / "emulation.so"
    subprocess.run([compiler, "-shared", "-Wl,-Bsymbolic", *objects, "-o", library], check=True)
    return Emulation(library)


def check(
    emulation: Emulation,
    x: torch.Tensor,
    bits: int,
    group_size: int,
    seed: int,
    rounding: str,
    blob_offset: int = 0,
    values_offset: int = 0,
) -> None:
    expected = reference.compress(x, bits, group_size, seed, None, rounding)
    blob = emulation.compress(x, bits, group_size, seed, rounding, blob_offset)
    assert torch.equal(blob, expected)
    shifted = torch.cat([torch.zeros(blob_offset, dtype=torch.uint8), blob])[blob_offset:]
    arguments = (x.dtype, bits, group_size, seed, rounding)
    values = emulation.decompress(shifted, x.numel(), *arguments, values_offset)
    exact = reference.decompress(blob, (x.numel(),), *arguments)
    assert torch.equal(values.view(torch.uint8), exact.view(torch.uint8))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("dtype", SOURCES, ids=str)
def test_every_width(emulation: Emulation, dtype: torch.dtype, group_size: int, rounding: str) -> None:
    """Regular groups, warps with both sorts of groups, irregular groups, and a tail."""
    for bits in range(1, 9):
        regular = inputs(1024 // group_size + 1, group_size, dtype, bits, KINDS[:6])
        mixed = inputs(2 * 1024 // group_size, group_size, dtype, bits)
        irregular = inputs(2, group_size, dtype, bits, KINDS[6:])
        tail = inputs(1, group_size // 2 + 5, dtype, bits, ("normal", "all"))
        check(emulation, torch.cat([regular, mixed, irregular, tail]), bits, group_size, 7 << 33 | bits, rounding)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_bfloat16_codes(emulation: Emulation, group_size: int, rounding: str) -> None:
    x = torch.cat([inputs(9, group_size, torch.float32, group_size), torch.randn(group_size // 2 + 3)])
    for blob_offset in (0, 2, 1):
        check(emulation, x, 16, group_size, -5, rounding, blob_offset)


@given(
    dtype=st.sampled_from(SOURCES),
    bits=st.integers(1, 8),
    group_size=st.sampled_from(GROUP_SIZES),
    rounding=st.sampled_from(ROUNDINGS),
    seed=st.integers(-(2**63), 2**63 - 1),
    numel=st.integers(0, 3) | st.integers(0, 5000),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    data_offset=st.integers(0, 9),
    blob_offset=st.sampled_from((0, 0, 1, 2, 4, 8)) | st.integers(0, 17),
    values_offset=st.integers(0, 9),
)
def test_any_alignment(
    emulation: Emulation,
    dtype: torch.dtype,
    bits: int,
    group_size: int,
    rounding: str,
    seed: int,
    numel: int,
    kinds: list[str],
    data_offset: int,
    blob_offset: int,
    values_offset: int,
) -> None:
    x = inputs(group_count(numel, 32), 32, dtype, seed % 1000, kinds)[:numel]
    padded = torch.full((data_offset + numel + 9,), math.nan, dtype=dtype)  # elements beyond would show
    padded[data_offset : data_offset + numel] = x
    x = padded[data_offset : data_offset + numel]
    check(emulation, x, bits, group_size, seed, rounding, blob_offset, values_offset)


@given(
    dtype=st.sampled_from(SOURCES),
    bits=st.sampled_from((1, 3, 4, 8)),
    group_size=st.sampled_from(GROUP_SIZES),
    rows=st.integers(1, 40),
    length=st.integers(1, 300) | st.sampled_from((8, 16, 32, 64, 96, 256)),
    gap=st.integers(0, 9) | st.sampled_from((4, 8, 16)),
    column=st.integers(0, 9) | st.sampled_from((4, 8, 16)),
    seed=st.integers(0, 2**32),
)
def test_rows_with_gaps(
    emulation: Emulation,
    dtype: torch.dtype,
    bits: int,
    group_size: int,
    rows: int,
    length: int,
    gap: int,
    column: int,
    seed: int,
) -> None:
    whole = torch.full((rows, column + length + gap), math.nan, dtype=dtype)  # elements beyond would show
    x = whole[:, column : column + length]
    x.copy_(inputs(group_count(x.numel(), 32), 32, dtype, seed % 1000, KINDS[:7])[: x.numel()].view(rows, length))
    assert emulation.reads(x)
    check(emulation, x, bits, group_size, seed, "stochastic")


@pytest.mark.parametrize("group_size", [32, 256])
def test_other_strides(emulation: Emulation, group_size: int) -> None:
    x = inputs(40, group_size, torch.float32, 1)
    check(emulation, x[::3], 5, group_size, 1, "stochastic")
    check(emulation, x[:1].expand(3 * group_size), 5, group_size, 1, "stochastic")
    check(emulation, x[: 2 * group_size].expand(3, -1), 5, group_size, 1, "stochastic")
    for x in (torch.empty(8, 8).t(), torch.empty(4, 8, 8)[:, :3, :3], torch.empty(8, 8)[:, ::2]):
        assert not emulation.reads(x)


@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers(emulation: Emulation, dtype: torch.dtype, bits: int) -> None:
    largest = min(2**bits, 2 ** (8 * dtype.itemsize - (dtype != torch.uint8)))
    for numel in (0, 1, 3, 255, 256, 257, 12345):
        x = torch.randint(0, largest, (numel,), generator=torch.Generator().manual_seed(numel)).to(dtype)
        expected = reference.compress(x, bits, 256, 0)
        for offset in (0, 1, 2, 4, 8):
            unaligned = torch.cat([x.new_zeros(offset), x])[offset:]
            packed = emulation.pack_integers(unaligned, bits, offset=offset)
            assert torch.equal(packed, expected)
            shifted = torch.cat([packed.new_zeros(offset), packed])[offset:]
            assert torch.equal(emulation.unpack_integers(shifted, numel, dtype, bits, offset), x)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_masks(emulation: Emulation, dtype: torch.dtype) -> None:
    for numel in (0, 1, 31, 256, 7777):
        values = torch.tensor([0, 0, 1, 2, 127, 128, 255]).to(dtype)  # in 8 bits, the sign alone as well
        x = values[torch.randint(len(values), (numel,))]
        packed = emulation.pack_integers(x, 1, is_mask=True)
        assert torch.equal(packed, reference.compress(x != 0, 1, 256, 0))
        assert torch.equal(emulation.unpack_integers(packed, numel, torch.uint8, 1), (x != 0).to(torch.uint8))


@pytest.mark.parametrize("bits", [1, 3, 7, 8, 12, 15, 16])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_out_of_range(emulation: Emulation, dtype: torch.dtype, bits: int) -> None:
    for wrong in (-1, 2**bits):
        if not torch.iinfo(dtype).min <= wrong <= torch.iinfo(dtype).max:
            continue
        x = torch.zeros(700, dtype=dtype)
        x[601] = wrong
        with pytest.raises(RuntimeError, match="integers must lie in"):
            emulation.pack_integers(x, bits)


def test_lanes_that_disagree_are_found(emulation: Emulation) -> None:
    assert emulation.disagree(True) == "a lane ended while others of its warp wait for it"
    assert emulation.disagree(False) == "lanes of a warp wait at different collectives"


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    # More runs than a kernel takes, too.
    runs=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 5)), min_size=1, max_size=40),
    rows=st.integers(1, 5),
    dtype=st.sampled_from(SOURCES),
    group_size=st.sampled_from(GROUP_SIZES[:4]),
    rounding=st.sampled_from(ROUNDINGS),
    seed=st.integers(-(2**63), 2**63 - 1),
    offset=st.integers(0, 17),
)
def test_widths_by_place(
    emulation: Emulation,
    kinds: list[str],
    runs: list[tuple[int, int]],
    rows: int,
    dtype: torch.dtype,
    group_size: int,
    rounding: str,
    seed: int,
    offset: int,
) -> None:
    by_place = written(runs)
    numel = rows * count_places(by_place) * group_size
    x = inputs(numel // 32, 32, dtype, seed % 1000, kinds)[:numel]
    code = (1, group_size, seed)
    expected = reference.compress(x, *code, None, rounding, by_place)
    blob = emulation.compress_by_place(x, group_size, seed, rounding, by_place, offset)
    assert torch.equal(blob, expected)
    shifted = torch.cat([torch.zeros(offset, dtype=torch.uint8), blob])[offset:]
    values = emulation.decompress_by_place(shifted, x, group_size, seed, rounding, by_place)
    exact = reference.decompress(blob, x.shape, dtype, *code, rounding, by_place)
    assert torch.equal(values.view(torch.uint8), exact.view(torch.uint8))


def test_what_the_tests_on_a_gpu_call_runs_on_the_cpu() -> None:
    """They run where there is a GPU alone, and would be out of date unnoticed."""
    x, mask, numbers = arguments(1, "cpu")
    *_, values, bools, halves, integers = round_trip(x, mask, numbers)
    torch.testing.assert_close(values, x, atol=0.3, rtol=0)
    torch.testing.assert_close(halves, x, atol=0, rtol=1e-2)
    assert torch.equal(bools, mask) and torch.equal(integers, numbers)
