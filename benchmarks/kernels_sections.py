"""The sections of `kernels.py`: what each of them times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from kernels_meter import OPERATORS, Call, Codec, Function, Job, Meter
from torch.nn.functional import gelu

from gact_fx.codec import reference

SMALL, MEDIUM, LARGE, HUGE = 64 << 10, 1 << 20, 64 << 20, 1 << 30
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SPELLED_OUT: tuple[Function, Function] = (reference.compress_whole, reference.decompress_whole)


def codec_jobs(
    section: str, way: str, codec: Codec, x: torch.Tensor, functions: tuple[Function, Function] = OPERATORS
) -> list[Job]:
    """Return the two jobs of a source and its blob."""
    blob = codec.compress(x)()
    calls = {
        "compress": codec.compress(x, functions[0]),
        "decompress": codec.decompress(blob, x.shape, functions[1]),
    }
    moved = x.nbytes + blob.nbytes
    return [Job(section, way, direction, codec, x.nbytes, moved, call) for direction, call in calls.items()]


def measure_codecs(meter: Meter, section: str, codecs: Sequence[Codec], nbytes: int) -> None:
    """Measure codecs of one dtype in the same rounds."""
    x = codecs[0].source(nbytes, meter.device)
    meter.measure([job for codec in codecs for job in codec_jobs(section, "operator", codec, x)])


# Rows of 256 groups whose widths are 4 bits in the mean: the first groups are wider, or every other stretch of 16 is.
PATTERNS = {"the first three of 256 groups wider": "8x3 4x249 1x4", "16 runs": " ".join(["6x16 2x16"] * 8)}


def measure_patterns(meter: Meter) -> None:
    """Widths by place beside one width of as many bits."""
    codecs = {"one width": Codec()} | {name: Codec(bits=1, by_place=digits) for name, digits in PATTERNS.items()}
    x = Codec().source(LARGE, meter.device)
    meter.measure([job for name, codec in codecs.items() for job in codec_jobs("patterns", name, codec, x)])


ROTATED = (1, 2, 4)  # widths of rotated codes


def by_dtype() -> list[list[Codec]]:
    """Return the codecs of the widths' table."""
    widths = [[Codec(dtype, bits) for bits in range(1, 9)] + [Codec(dtype, 4, "dither")] for dtype in FLOATS]
    for row, dtype in zip(widths, FLOATS, strict=True):
        row += [Codec(dtype, bits, "rotated") for bits in ROTATED]
    widths[0] += [Codec(rounding="nearest"), Codec(bits=16)]
    return [*widths, [Codec(torch.bool, 1)], [Codec(torch.int64, 4)]]


def measure_quickly(meter: Meter) -> None:
    """Measure the rows that the checklist reads."""
    if meter.device == "cpu":
        widths = [Codec(bits=bits) for bits in range(3, 8)]
        rotated = [Codec(bits=bits, rounding="rotated") for bits in ROTATED]
        measure_codecs(meter, "widths", [*widths, Codec(rounding="dither"), *rotated], LARGE)
        measure_codecs(meter, "widths", [Codec()], SMALL)
        return
    for dtype in (torch.float32, torch.bfloat16):
        for nbytes in (LARGE, HUGE):
            measure_codecs(meter, "widths", [Codec(dtype)], nbytes)


def measure_widths(meter: Meter) -> None:
    for nbytes in (LARGE, MEDIUM, SMALL):
        for codecs in by_dtype():
            measure_codecs(meter, "widths", codecs, nbytes)
    if meter.device == "cuda":
        for dtype in (torch.float32, torch.bfloat16):
            measure_codecs(meter, "widths", [Codec(dtype)], HUGE)


def measure_groups(meter: Meter) -> None:
    measure_codecs(meter, "groups", [Codec(group_size=size) for size in (32, 64, 128, 256, 512, 1024)], LARGE)


def measure_strided(meter: Meter) -> None:
    """Sources with gaps or permuted: as they are, and copied to contiguous memory first."""
    codec = Codec()
    rows = LARGE // (4 * 768)
    gaps = torch.randn(rows, 2304, device=meter.device)[:, :768]
    images = torch.randn(16, 256, 64, 64, device=meter.device).contiguous(memory_format=torch.channels_last)
    jobs = []
    for name, x in (("rows with gaps, x[:, :768] of 2304", gaps), ("channels last, read as NCHW", images)):
        ways: dict[str, Call] = {
            "as it is": codec.compress(x),
            "contiguous() first": partial(_contiguous_first, codec, x),
            "already contiguous": codec.compress(x.contiguous()),
        }
        moved = x.nbytes + ways["as it is"]().nbytes
        jobs += [
            Job("strided", f"{name}: {way}", "compress", codec, x.nbytes, moved, call) for way, call in ways.items()
        ]
    meter.measure(jobs)


def _contiguous_first(codec: Codec, x: torch.Tensor) -> Any:
    return codec.compress(x.contiguous())()


def measure_reference(meter: Meter) -> None:
    """The same in PyTorch: one expression under torch.compile, and in eager, which is slow: a few rounds."""
    codec = Codec()
    compress, decompress = (torch.compile(function, dynamic=False, fullgraph=True) for function in SPELLED_OUT)
    for nbytes in (LARGE, MEDIUM):
        x = codec.source(nbytes, meter.device)
        jobs = codec_jobs("reference", "operator", codec, x)
        meter.measure(jobs + codec_jobs("reference", "PyTorch, torch.compile", codec, x, (compress, decompress)))
        eager = codec_jobs("reference", "PyTorch, eager", codec, x, (reference.compress, reference.decompress))
        meter.measure(eager, rounds=5)


def measure_fusion(meter: Meter) -> None:
    """Inductor's graphs: gelu and a compression of its result; a gradient times what is decompressed."""
    for nbytes in (LARGE, MEDIUM):
        torch._dynamo.reset()  # or the sizes would count against the limit of recompilations
        meter.measure(fusion_jobs(Codec(), nbytes, meter.device))


def fusion_jobs(codec: Codec, nbytes: int, device: str) -> list[Job]:
    x, gradient = (codec.source(nbytes, device) for _ in range(2))
    y = gelu(x)
    blob = codec.compress(y)()

    def forward_with(function: Function) -> Callable[[torch.Tensor], object]:
        def forward(x: torch.Tensor) -> object:
            y = gelu(x)
            return y, codec.compress(y, function)()

        return forward

    def backward_with(function: Function) -> Callable[[torch.Tensor, torch.Tensor], object]:
        def backward(gradient: torch.Tensor, blob: torch.Tensor) -> object:
            return gradient * codec.decompress(blob, gradient.shape, function)()

        return backward

    def activation(x: torch.Tensor) -> object:
        return gelu(x)

    def times(gradient: torch.Tensor, saved: torch.Tensor) -> object:
        return gradient * saved

    def job(way: str, direction: str, moved: int, function: Callable[..., object], *args: torch.Tensor) -> Job:
        call = partial(torch.compile(function, dynamic=False, fullgraph=True), *args)
        return Job("fusion", way, direction, codec, nbytes, moved, call)

    ways = {"operator in Inductor's graph": OPERATORS, "spelled out and fused": SPELLED_OUT}
    moved = 2 * nbytes + blob.nbytes
    jobs = [
        job("nothing compressed", "forward", 2 * nbytes, activation, x),
        job("nothing compressed", "backward", 3 * nbytes, times, gradient, y),
    ]
    for way, (compress, decompress) in ways.items():
        jobs.append(job(way, "forward", moved, forward_with(compress), x))
        jobs.append(job(way, "backward", moved, backward_with(decompress), gradient, blob))
    return jobs
