"""The steps of `gpu_run.py`: the commands of each on a GPU, and what of it can be rehearsed without one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"
Command = tuple[str, ...]
PYTHON = sys.executable
# What says enough in minutes; `peers.py --resume` measures the others.
PEERS = ("eager", "compile", "checkpoint", "selective", "budget-0", "hooks-4", "gact-8", "gact-4", "gact-2")
SANITIZERS = ("memcheck", "racecheck", "synccheck")
# Each kernel with each kind of tensor, but none that starts other processes, compiles, or fails on purpose.
SANITIZED = "unaligned or by_place or every_width or does_not_synchronize or (integers and not assertion)"


@dataclass(frozen=True)
class Step:
    """``share_s`` are its seconds of the 25 minutes; ``needs`` the modules without which nothing of it runs.

    ``commands`` get the seconds that there are, and run on a GPU, in ``folder``; ``rehearsal`` runs without one.
    """

    name: str
    about: str
    share_s: int
    commands: Callable[[float], list[Command]]
    rehearsal: Callable[[], list[Command]]
    needs: tuple[str, ...] = ()
    folder: Path = BUILD  # so that no other gact_fx comes first on Python's path
    without_gpu: str = ""
    without_tool: str = ""


def missing(modules: Sequence[str]) -> list[str]:
    return [module for module in modules if importlib.util.find_spec(module) is None]


def benchmark(name: str, *arguments: str) -> Command:
    return (PYTHON, str(ROOT / "benchmarks" / f"{name}.py"), *arguments)


def networks() -> tuple[str, ...]:
    """Those that can be built here."""
    return ("unet",) if missing(["transformers"]) else ("bert", "unet", "gpt2", "resnet50")


def tool(name: str) -> str | None:
    """A program of the CUDA toolkit."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


def _build(seconds: float) -> list[Command]:
    objects = str(ROOT / "build" / "gpu-objects")
    make = (PYTHON, "setup.py", "-q", "build", "--build-base", objects, "--build-lib", str(BUILD))
    check = (
        f"import sys; sys.path.insert(0, {str(BUILD)!r}); from gact_fx.ops import has_compiled_kernels as has; "
        "sys.exit(0 if has('cuda') else 'the extension has no CUDA kernels; see above why it is built without')"
    )
    return [make, (PYTHON, "-c", check)]


def cuda_tests() -> list[str]:
    """The files of tests that need a GPU."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path) for path in files if "pytest.mark.cuda" in path.read_text()]


def _pytest(*arguments: str) -> Command:
    settings = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-m", "cuda")
    return (PYTHON, "-m", "pytest", "-q", *settings, *arguments, *cuda_tests())


def _workers() -> tuple[str, ...]:
    """Processes that share the card: compiling and the reference take the time, on the CPU."""
    return () if missing(["xdist"]) else ("-n", str(min(8, os.cpu_count() or 1)))


def _peers(seconds: float) -> list[Command]:
    measure = benchmark(
        "peers", "--amp", "--device", "cuda", "--times", "fill", "--turns", "5", "--without-error",
        "--seconds", f"{max(seconds - 60, 30):.0f}", "--methods", *PEERS, "--", *networks(),
    )  # fmt: skip
    return [measure, benchmark("peers", "--amp", "--device", "cuda", "--times", "fill", "--plot")]


def _sanitizer(seconds: float) -> list[Command]:
    program = tool("compute-sanitizer")
    if program is None:
        return []
    options = ("--error-exitcode", "1", "--target-processes", "application-only")
    return [(program, "--tool", each, *options, *_pytest("-k", SANITIZED)) for each in SANITIZERS]


def _check_kernels() -> list[Command]:
    return [("bash", str(ROOT / "csrc" / "cuda" / "check.sh"))] if tool("nvcc") else []


STEPS = (
    Step(
        "build",
        "the extension with its CUDA kernels, in build/gpu",
        100,
        _build,
        _check_kernels,
        needs=("setuptools",),
        folder=ROOT,
        without_gpu="there is neither a GPU nor nvcc: nothing to rehearse",
    ),
    Step(
        "test",
        "the CUDA kernels against the reference, and training against eager PyTorch",
        240,
        lambda seconds: [_pytest(*_workers())],
        lambda: [_pytest("--collect-only")],
        needs=("pytest", "hypothesis"),
    ),
    Step(
        "kernels",
        "rates of compress and decompress beside a copy",
        180,
        lambda seconds: [benchmark("kernels", "--device", "cuda")],
        lambda: [benchmark("kernels", "--device", "cpu", "--quick")],
    ),
    Step(
        "peak",
        "peak memory of a step in bf16, with rows that fill the card",
        180,
        lambda seconds: [benchmark("peak", "--amp", "--device", "cuda", "--times", "fill", *networks()[:2])],
        lambda: [benchmark("peak", "--small", "--ways", "torch.compile", "--", networks()[0])],
    ),
    Step(
        "peers",
        "what people use beside gact_fx, in bf16",
        300,
        _peers,
        lambda: [benchmark("peers", "--small", "--turns", "1", "--methods", "eager", "hooks-4", "--", networks()[0])],
    ),
    Step(
        "step",
        "BERT, ResNet-50 and GPT-2 in bf16, with rows that fill the card",
        400,
        lambda seconds: [benchmark("gpu")],
        lambda: [benchmark("gpu", "--device", "cpu", "--steps", "1", "--", "bert")],
        needs=("transformers",),
    ),
    Step(
        "sanitizer",
        "the kernels under compute-sanitizer",
        100,
        _sanitizer,
        lambda: [],
        needs=("pytest", "hypothesis"),
        without_gpu="compute-sanitizer needs a GPU: nothing to rehearse",
        without_tool="there is no compute-sanitizer, on PATH or in /usr/local/cuda/bin",
    ),
)
