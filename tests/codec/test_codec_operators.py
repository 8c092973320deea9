"""The operators as PyTorch sees them: schemas, fakes, tags, errors, compilation, sizes and layouts.

What holds for every input stands in test_codec_hypothesis.py, what the noise is like in test_statistics.py.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gact_fx import ops
from gact_fx.codec import operators, reference
from gact_fx.codec.layout import blob_nbytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
needs_kernels = pytest.mark.skipif(not ops.has_compiled_kernels("cpu"), reason="libgact_fx is not built")


def implementations() -> list[object]:
    kernel = pytest.param(torch.ops.gact_fx, marks=needs_kernels, id="kernel")
    return [pytest.param(reference, id="reference"), kernel]


def run_tests_with(environment: dict[str, str], *tests: str) -> None:
    """Run tests in a fresh interpreter: which kernels serve is settled at import."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout and "skipped" not in done.stdout, done.stdout


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    bits = 1 if dtype == torch.bool else 3
    x = (torch.randn(3, 7, 31) > 0) if dtype == torch.bool else torch.randn(3, 7, 31).to(dtype)
    mask = None if dtype == torch.bool else torch.rand(5, 9) > 0.5
    torch.library.opcheck(torch.ops.gact_fx.compress.default, (x, bits, 64, 5, mask))
    torch.library.opcheck(torch.ops.gact_fx.compress.default, (x.transpose(0, 2), bits, 64, 5))
    blob = ops.compress(x, bits, 64, 5)
    torch.library.opcheck(torch.ops.gact_fx.decompress.default, (blob, x.shape, dtype, bits, 64))


def test_a_blob_behind_something_is_a_copy() -> None:
    blob = torch.arange(9, dtype=torch.uint8)
    torch.library.opcheck(torch.ops.gact_fx.behind.default, (blob, torch.randn(3)))
    found = torch.ops.gact_fx.behind(blob, torch.randn(3))
    assert torch.equal(found, blob) and found.data_ptr() != blob.data_ptr()


@pytest.mark.slow
@needs_kernels
def test_opcheck_without_extension() -> None:
    run_tests_with({"GACT_FX_NO_EXT": "1"}, f"{__file__}::test_opcheck", f"{__file__}::test_reference_serves")


@pytest.mark.skipif(ops.has_compiled_kernels("cpu"), reason="libgact_fx is loaded")
def test_reference_serves() -> None:
    x = torch.randn(100)
    assert torch.equal(ops.compress(x, 4), reference.compress(x, 4, 256, 0))


def test_a_library_that_does_not_load_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GACT_FX_NO_EXT", raising=False)
    monkeypatch.setattr(operators, "LIBRARY", tmp_path / "libgact_fx.so")
    assert "installed without libgact_fx.so" in operators._load_library()
    (tmp_path / "libgact_fx.so").write_text("not a library")
    with pytest.warns(UserWarning, match="many times slower; .* does not load beside torch .*(file too short|header)"):
        assert "does not load" in operators._load_library()


@needs_kernels
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs binutils")
def test_the_library_needs_neither_python_nor_the_cpp_abi_of_torch() -> None:
    """Else it would serve one Python, or one torch."""
    done = subprocess.run(["nm", "-D", str(operators.LIBRARY)], capture_output=True, text=True, check=True)
    symbols = [line.split()[-1] for line in done.stdout.splitlines()]
    assert any(symbol.startswith("aoti_torch_") for symbol in symbols)
    assert not [symbol for symbol in symbols if re.match(r"_?Py|_ZNK?(2at|3c10|5torch)", symbol)]


def test_tags() -> None:
    for op in (torch.ops.gact_fx.compress.default, torch.ops.gact_fx.decompress.default):
        assert torch.Tag.flexible_layout in op.tags
        assert torch.Tag.pt2_compliant_tag in op.tags
        assert torch.Tag.nondeterministic_seeded not in op.tags


def test_has_compiled_kernels_for_unknown_device() -> None:
    assert not ops.has_compiled_kernels("meta")
    assert not ops.has_compiled_kernels("no such device")


@needs_kernels
@pytest.mark.parametrize("dtype", ["[torch.float32]", pytest.param("", marks=pytest.mark.slow, id="of all dtypes")])
@pytest.mark.parametrize("capability", ["avx2", pytest.param("baseline", marks=pytest.mark.slow)])
def test_every_instruction_set(capability: str, dtype: str) -> None:
    """`make sanitize` has all dtypes, too."""
    tests = os.path.join(os.path.dirname(__file__), "test_codec_hypothesis.py")
    run_tests_with({"GACT_FX_CPU_CAPABILITY": capability}, f"{tests}::test_kernel_matches_reference_everywhere{dtype}")


@pytest.mark.parametrize("module", implementations())
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(4), 9, 256, 0), r"gact_fx.compress: bits must lie in \[1, 8\], or be 16 for bfloat16, got 9"),
        ((torch.zeros(4), 0, 256, 0), r"gact_fx.compress: bits must lie in \[1, 8\], or be 16 for bfloat16, got 0"),
        ((torch.zeros(4), 4, 100, 0), r"gact_fx.compress: group_size must be a power of two in \[32, 1024\], got 100"),
        ((torch.zeros(4), 4, 2048, 0), "gact_fx.compress: group_size must be a power of two"),
        ((torch.zeros(4), 4, -64, 0), "gact_fx.compress: group_size must be a power of two"),
        (
            (torch.zeros(4, dtype=torch.complex64), 4, 256, 0),
            "gact_fx.compress: dtype must be float32, bfloat16, float16, float64, or bool or an integer to be packed",
        ),
        ((torch.zeros(4).bool(), 2, 256, 0), "gact_fx.compress: bits must be 1 for a mask, got 2"),
        ((torch.zeros(4).bool(), 1, 256, 0, torch.zeros(4).bool()), "gact_fx.compress: mask must be None"),
        ((torch.zeros(4), 4, 256, 0, torch.zeros(4)), "gact_fx.compress: mask must have dtype bool"),
        ((torch.zeros(4).int(), 17, 256, 0), r"gact_fx.compress: bits must lie in \[1, 16\] for integers, got 17"),
        ((torch.zeros(4).int(), 3, 256, 0, torch.zeros(4).bool()), "gact_fx.compress: mask must be None"),
        ((torch.tensor([1, 8]), 3, 256, 0), r"gact_fx.compress: integers must lie in \[0, 8\) at 3 bits"),
        ((torch.tensor([1, -1]), 3, 256, 0), r"gact_fx.compress: integers must lie in \[0, 8\) at 3 bits"),
        ((torch.tensor([1, -1], dtype=torch.int8), 8, 256, 0), r"gact_fx.compress: integers must lie in \[0, 256\)"),
        (
            (torch.tensor([1, -1], dtype=torch.int16), 16, 256, 0),
            r"gact_fx.compress: integers must lie in \[0, 65536\)",
        ),
        ((torch.tensor([2, 256]), 8, 256, 0), r"gact_fx.compress: integers must lie in \[0, 256\) at 8 bits"),
        ((torch.tensor([2, 2**40]), 16, 256, 0), r"gact_fx.compress: integers must lie in \[0, 65536\)"),
        ((torch.zeros(4).half(), 16, 256, 0), r"gact_fx.compress: 16 bits \(bfloat16\) are for float32 tensors"),
        ((torch.zeros(4), 4, 256, 0, None, "up"), "gact_fx.compress: rounding must be one of .*, got 'up'"),
        ((torch.zeros(4), 16, 256, 0, None, "dither"), "gact_fx.compress: rounding 'dither' needs bits in"),
        ((torch.zeros(64), 1, 32, 0, None, "dither", "1 9"), "by_place must be like .*, got '1 9'"),
        ((torch.zeros(96), 1, 32, 0, None, "dither", "1 2"), "whole rows, got 2 groups of 32 for 96 elements"),
        ((torch.zeros(64).int(), 1, 32, 0, None, "dither", "1 2"), "by_place must be '' for masks and integers"),
    ],
)
def test_compress_errors(module: object, arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module.compress(*arguments)  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", implementations())
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(9).byte(), (4,), torch.float32, 4, 256), "blob must have at least 134 bytes for size .*, got 9"),
        ((torch.zeros(9).byte(), (400,), torch.bool, 4, 256), "blob must have at least 64 bytes for size .*, got 9"),
        ((torch.zeros(999), (4,), torch.float32, 4, 256), "blob must be a 1-D uint8 tensor"),
        ((torch.zeros(9, 9).byte(), (4,), torch.float32, 4, 256), "blob must be a 1-D uint8 tensor, got 2-D"),
        (
            (torch.zeros(999).byte(), (4,), torch.complex64, 4, 256),
            "dtype must be float32, bfloat16, float16, float64, or bool or an integer to be packed",
        ),
        ((torch.zeros(999).byte(), (-4,), torch.float32, 4, 256), "size must not be negative"),
        (
            (torch.zeros(999).byte(), (4,), torch.float32, 9, 256),
            r"bits must lie in \[1, 8\], or be 16 for bfloat16, got 9",
        ),
        ((torch.zeros(999).byte(), (4,), torch.int16, 17, 256), r"bits must lie in \[1, 16\] for integers, got 17"),
        ((torch.zeros(999).byte(), (4,), torch.bfloat16, 16, 256), "16 bits .bfloat16. are for float32 tensors"),
        ((torch.zeros(999).byte(), (4,), torch.float32, 4, 256, 0, "up"), "rounding must be one of .*, got 'up'"),
        ((torch.zeros(999).byte(), (4,), torch.float32, 16, 256, 0, "dither"), "rounding 'dither' needs bits in"),
        ((torch.zeros(999).byte(), (4,), torch.float32, 4, 33), "group_size must be a power of two"),
        ((torch.zeros(999).byte(), (96,), torch.float32, 1, 32, 0, "dither", "1 2"), "by_place must be for whole rows"),
        ((torch.zeros(9).byte(), (64,), torch.float32, 1, 32, 0, "dither", "1 2"), "blob must have at least 24 bytes"),
    ],
)
def test_decompress_errors(module: object, arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match="gact_fx.decompress: " + message):
        module.decompress(*arguments)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("bits", "bytes_per_group"), [(1, 38), (4, 134), (7, 230), (8, 262)])
def test_blob_nbytes(bits: int, bytes_per_group: int) -> None:
    assert blob_nbytes(0, torch.float32, bits, 256) == 0
    assert blob_nbytes(1, torch.float32, bits, 256) == bytes_per_group
    assert blob_nbytes(257, torch.bfloat16, bits, 256, mask_numel=300) == 2 * (bytes_per_group - 2) + 64
    assert blob_nbytes(257, torch.bool, bits, 256) == 64


@pytest.mark.parametrize("module", implementations())
def test_code_layout(module: object) -> None:
    """Pin the bytes: 7 bits are a plane of 4, one of 2 and one of 1, low bits first, with strides for neighbours."""
    codes = (torch.arange(32) * 37 + 11) % 128
    codes[3], codes[5] = 0, 127
    blob = module.compress(codes.float(), 7, 32, 0)  # type: ignore[attr-defined]
    expected = []
    for width, offset in ((4, 0), (2, 4), (1, 6)):
        stride = 32 * width // 8
        for j in range(stride):
            parts = [int(codes[j + k * stride]) >> offset & (1 << width) - 1 for k in range(8 // width)]
            expected.append(sum(part << k * width for k, part in enumerate(parts)))
    assert blob.tolist() == [*expected, 0, 0, 0, 0, 0x80, 0x3F]  # minimum 0.0f, step bfloat16 1.0


def test_fake_with_symbolic_shapes() -> None:
    """The sizes that the fakes derive hold for every shape: one graph, no recompilation, for several."""
    torch._dynamo.reset()
    compiled_graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        compiled_graphs.append(graph)
        return graph

    def roundtrip(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        blob = torch.ops.gact_fx.compress(x, 3, 64, 9, mask)
        return (
            blob,
            torch.ops.gact_fx.decompress(blob, x.shape, x.dtype, 3, 64),
            torch.ops.gact_fx.decompress(blob, mask.shape, torch.bool, 3, 64),
        )

    compiled = torch.compile(roundtrip, backend=count, dynamic=True, fullgraph=True)
    aot = torch.compile(roundtrip, backend="aot_eager", dynamic=True, fullgraph=True)
    for shape in ((5, 70), (31, 33), (64, 257)):
        x, mask = torch.randn(shape), torch.rand(shape[0], 3, shape[1]) > 0.5
        for function in (compiled, aot):
            for actual, expected in zip(function(x, mask), roundtrip(x, mask), strict=True):
                assert torch.equal(actual, expected)
    assert len(compiled_graphs) == 1


def test_inductor_on_channels_last() -> None:
    """Inductor hands over a convolution's output in another layout than it traced; the elements are the same."""
    torch._dynamo.reset()
    convolution = torch.nn.Conv2d(3, 16, 3)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = convolution(x)
        blob = torch.ops.gact_fx.compress(y, 4, 256, 3, y > 0)
        decoded = torch.ops.gact_fx.decompress(blob, y.shape, y.dtype, 4, 256)
        return y, decoded * 2, torch.ops.gact_fx.decompress(blob, y.shape, torch.bool, 4, 256)

    x = torch.randn(2, 3, 17, 19).to(memory_format=torch.channels_last)
    with torch.no_grad():
        y, doubled, mask = torch.compile(function)(x)
        blob = ops.compress(y.contiguous(), 4, 256, 3)
    assert torch.equal(doubled, 2 * ops.decompress(blob, y.shape, y.dtype, 4))
    assert torch.equal(mask, y > 0)


def test_no_generator_is_consumed() -> None:
    state = torch.get_rng_state()
    ops.compress(torch.arange(1000.0), 2)
    assert torch.equal(state, torch.get_rng_state())


@needs_kernels
def test_threads_do_not_matter() -> None:
    x = torch.randn(1 << 20)
    threads = torch.get_num_threads()
    try:
        blobs = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            blobs.append(ops.compress(x, 5))
    finally:
        torch.set_num_threads(threads)
    for blob in (*blobs, reference.compress(x, 5, 256, 0)):
        assert torch.equal(blobs[0], blob)


def available_memory() -> int:
    """Bytes of memory that can be had without swapping; 0 where the system does not say."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), 0)


@pytest.mark.slow
@needs_kernels
@pytest.mark.skipif(available_memory() < 14 * 2**30, reason="needs 14 GiB of memory")
def test_more_than_2_to_the_31_elements() -> None:
    """Codes, metadata and elements beyond what 32 bits count; every chunk is what it would be alone, but for noise."""
    numel = 2**31 + 777
    x = torch.empty(numel, dtype=torch.bfloat16)
    pattern = torch.randn(1 << 20).to(torch.bfloat16)
    for first in range(0, numel, 1 << 20):
        x[first : first + (1 << 20)] = pattern[: numel - first]
    blob = ops.compress(x, 4, 256, 0, None, "nearest")
    groups = (numel + 255) // 256
    assert blob.numel() == groups * (128 + 2 + 2)
    alone = ops.compress(pattern[:777], 4, 256, 0, None, "nearest")
    assert torch.equal(blob[(groups - 4) * 128 : groups * 128], alone[: 4 * 128])
    assert torch.equal(blob[-4 * 2 :], alone[-4 * 2 :])
    decoded = ops.decompress(blob, x.shape, x.dtype, 4, 256, 0, "nearest")
    expected = ops.decompress(alone, (777,), x.dtype, 4, 256, 0, "nearest")
    assert torch.equal(decoded[-777:], expected)
    assert torch.equal(decoded[: 1 << 20], decoded[2**30 : 2**30 + (1 << 20)])


@needs_kernels
def test_views_with_gaps_are_read_in_place() -> None:
    """Without a copy where neighbours share cache lines, with one otherwise: what is allocated tells."""
    wide = torch.randn(512, 3072)
    sources = {"gaps": (wide[:, 1024:2048], 0), "columns": (wide[:, ::2], 0), "transposed": (wide.t(), 1)}
    for name, (x, copies) in sources.items():
        with torch.profiler.profile(profile_memory=True) as profile:
            blob = ops.compress(x, 4)
        # What PyTorch's operators allocate within ours, which allocates the blob without one.
        others = [event for event in profile.events() if event.name != "gact_fx::compress"]
        allocated = sum(max(event.self_cpu_memory_usage, 0) for event in others)
        # Some kilobytes are the profiler's.
        assert allocated == pytest.approx(copies * x.numel() * 4, abs=1 << 16), name
        assert torch.equal(blob, ops.compress(x.contiguous(), 4))
