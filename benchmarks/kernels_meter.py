"""What `kernels.py` times, and how: jobs, their timings beside copies, and the codec's arguments."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import gact_fx  # noqa: F401  (registers the operators)
from gact_fx.codec.layout import INTEGER_DTYPES

SEED = 1
ROUNDS = 31
FEWEST_ROUNDS = 3
SECONDS_PER_JOB = 0.8  # when they are used up, no new round is begun

Call = Callable[[], Any]
Function = Callable[..., Any]
OPERATORS: tuple[Function, Function] = (torch.ops.gact_fx.compress, torch.ops.gact_fx.decompress)


@dataclass(frozen=True)
class Codec:
    """The operators' arguments but for tensors."""

    dtype: torch.dtype = torch.float32
    bits: int = 4
    rounding: str = "stochastic"
    group_size: int = 256
    by_place: str = ""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def rounding_name(self) -> str:
        return "exact" if self.dtype in INTEGER_DTYPES else self.rounding

    @property
    def _keywords(self) -> dict[str, str]:
        given = {"rounding": self.rounding} if self.rounding != "stochastic" else {}
        return {**given, "by_place": self.by_place} if self.by_place else given

    def source(self, nbytes: int, device: str) -> torch.Tensor:
        """Return a random tensor of this many bytes."""
        numel = nbytes // self.dtype.itemsize
        if self.dtype in INTEGER_DTYPES:
            return torch.randint(1 << self.bits, (numel,), device=device).to(self.dtype)
        return torch.randn(numel, device=device).to(self.dtype)

    def compress(self, x: torch.Tensor, function: Function = OPERATORS[0]) -> Call:
        return partial(function, x, self.bits, self.group_size, SEED, **self._keywords)

    def decompress(self, blob: torch.Tensor, size: Sequence[int], function: Function = OPERATORS[1]) -> Call:
        return partial(function, blob, list(size), self.dtype, self.bits, self.group_size, SEED, **self._keywords)


@dataclass(frozen=True)
class Job:
    """One thing to time: ``way`` is the line of its section's table, ``direction`` the column."""

    section: str
    way: str
    direction: str
    codec: Codec
    nbytes: int  # of the uncompressed tensor
    moved: int  # bytes read plus bytes written
    call: Call


@dataclass(frozen=True)
class Row:
    """A job's seconds per call and those of the copy in front of it, by round.

    ``counted`` are the bytes that a rate counts, ``counted_copy`` the copy's.
    """

    job: Job
    counted: int
    counted_copy: int
    seconds: tuple[float, ...]
    copy_seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def gigabytes(self) -> float:
        return self.counted / self.median / 1e9

    @property
    def copy_gigabytes(self) -> float:
        return self.counted_copy / statistics.median(self.copy_seconds) / 1e9

    @property
    def ratios(self) -> list[float]:
        """The rate as a multiple of the copy's, by round."""
        factor = self.counted / self.counted_copy
        return [factor * copy / own for own, copy in zip(self.seconds, self.copy_seconds, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def rate_of(self, other: Row) -> float:
        """Return the rate as a multiple of that of another row of the same rounds."""
        factor = self.counted / other.counted
        return factor * statistics.median(b / a for a, b in zip(self.seconds, other.seconds, strict=True))

    def to_json(self) -> dict[str, Any]:
        job, codec = self.job, self.job.codec
        return {
            "section": job.section,
            "way": job.way,
            "direction": job.direction,
            "dtype": codec.dtype_name,
            "bits": codec.bits,
            "rounding": codec.rounding_name,
            "group_size": codec.group_size,
            "nbytes": job.nbytes,
            "rounds": len(self.seconds),
            "gigabytes_per_second": short(self.gigabytes),
            "seconds": _summary(self.seconds),
            "copy_seconds": _summary(self.copy_seconds),
            "ratio_to_copy": _summary(self.ratios),
        }


@dataclass(frozen=True)
class Check:
    """A target and what was measured; ``at_least`` tells on which side of the target it should lie."""

    name: str
    measured: float
    target: float
    unit: str
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.measured >= self.target if self.at_least else self.measured < self.target


def _summary(values: Sequence[float]) -> dict[str, float]:
    quartile_1, median, quartile_3 = statistics.quantiles(values, n=4, method="inclusive")
    found = {"median": median, "quartile_1": quartile_1, "quartile_3": quartile_3, "min": min(values)}
    return {name: short(value) for name, value in found.items()}


def short(value: float) -> float:
    """Return the value to four digits."""
    return float(f"{value:.4g}")


class Meter:
    """Times jobs on a device, interleaved with copies between buffers that it keeps, and collects the rows."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.rows: list[Row] = []
        self.page_faults = 0  # while it was timing
        self._copies: dict[int, Call] = {}

    @property
    def copy_name(self) -> str:
        return "memcpy" if self.device == "cpu" else "device-to-device copy"

    def measure(self, jobs: Sequence[Job], rounds: int = ROUNDS) -> list[Row]:
        """Time the jobs in turn, round by round, each right behind a copy of as many bytes."""
        # The copy has a source of its own: one that it shared would be warmer in the cache for whoever comes second.
        calls = [call for job in jobs for call in (self._copy(job.nbytes), job.call)]
        counts = [self._count(call) for call in calls]
        for call in calls:  # once more, in order: by now malloc has blocks for all of them
            call()
        samples: list[list[float]] = []
        faults = _page_faults()
        end = time.perf_counter() + SECONDS_PER_JOB * len(jobs)
        while len(samples) < FEWEST_ROUNDS or (len(samples) < rounds and time.perf_counter() < end):
            samples.append([self._seconds(call, count) for call, count in zip(calls, counts, strict=True)])
        self.page_faults += _page_faults() - faults
        columns = list(zip(*samples, strict=True))
        rows = [self._row(job, columns[2 * i + 1], columns[2 * i]) for i, job in enumerate(jobs)]
        self.rows += rows
        return rows

    def _row(self, job: Job, seconds: tuple[float, ...], copy_seconds: tuple[float, ...]) -> Row:
        if self.device == "cpu":
            return Row(job, job.nbytes, job.nbytes, seconds, copy_seconds)
        return Row(job, job.moved, 2 * job.nbytes, seconds, copy_seconds)

    def _copy(self, nbytes: int) -> Call:
        if nbytes not in self._copies:
            source, destination = (Codec().source(nbytes, self.device) for _ in range(2))
            self._copies[nbytes] = partial(destination.copy_, source)
        return self._copies[nbytes]

    def _count(self, call: Call) -> int:
        """Warm up, and return how many calls make a measurement that is long beside the clock's own time."""
        call()
        quickest = min(self._seconds(call, 1) for _ in range(3))
        return max(1, min(1000, math.ceil((2e-3 if self.device == "cpu" else 5e-3) / quickest)))

    def _seconds(self, call: Call, count: int) -> float:
        return (_cpu_seconds if self.device == "cpu" else _cuda_seconds)(call, count) / count


def _cpu_seconds(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start


def _cuda_seconds(call: Call, count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _page_faults() -> int:
    """Return the page faults of this process so far, 0 where the system does not tell."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
