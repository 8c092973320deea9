"""``python -m gact_fx doctor``: what is installed, what works, and what mends the rest."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata

import torch

from gact_fx.codec import reference
from gact_fx.codec.operators import LIBRARY, WHY_NOT_LOADED, compress, cpu_capability, has_compiled_kernels
from gact_fx.graphs.compilers import cpp_compiler
from gact_fx.graphs.toolchain import compilation_failure

OLDEST_PYTHON, OLDEST_TORCH, NEWEST_TORCH = (3, 10), (2, 11), (2, 13)
GOOD, NOTE, MISSING = "ok", "note", "missing"
_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps . (in the sources of gact_fx)"
_COMPILER = (
    "install a C++ compiler (apt install g++, dnf install gcc-c++, xcode-select --install) or name one in CXX; "
    'inner="eager" trains without one, slower'
)


@dataclass(frozen=True)
class Finding:
    """What was found of one thing: "ok", a "note" on what gact_fx does without, or "missing"; ``cure`` is a command."""

    name: str
    status: str
    text: str
    cure: str = ""


def examine(try_compiler: Callable[[], str] = compilation_failure) -> list[Finding]:
    """Everything that gact_fx needs or can use; compiles a small function with ``try_compiler``."""
    return [*_versions(), *_kernels(), *_cuda(), _compiler(try_compiler)]


def describe(findings: list[Finding]) -> str:
    """A line for each finding, and the cures below those that need one."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.name:{width}}  {finding.status:7}  {finding.text}")
        if finding.cure:
            lines.append(f"{'':{width}}           cure: {finding.cure}")
    missing = [finding.name for finding in findings if finding.status == MISSING]
    lines.append(f"gact_fx needs, and does not find: {', '.join(missing)}" if missing else "gact_fx has what it needs")
    return "\n".join(lines)


def _versions() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    is_old = sys.version_info[:2] < OLDEST_PYTHON
    cure = f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or later" if is_old else ""
    yield Finding("Python", MISSING if is_old else GOOD, f"{python}, {platform.platform()}", cure)
    try:
        version = metadata.version("gact-fx")
    except metadata.PackageNotFoundError:
        version = "of a source tree that is not installed"
    yield Finding("gact_fx", GOOD, version)
    yield _torch(str(torch.__version__))


def _torch(version: str) -> Finding:
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else OLDEST_TORCH
    oldest, newest = (".".join(map(str, x)) for x in (OLDEST_TORCH, NEWEST_TORCH))
    if release < OLDEST_TORCH:
        return Finding("torch", MISSING, version, f"pip install 'torch>={oldest}'")
    if release > NEWEST_TORCH:
        return Finding("torch", NOTE, f"{version}; gact_fx was tried with torch {oldest} to {newest}")
    return Finding("torch", GOOD, version)


def _kernels() -> Iterator[Finding]:
    if WHY_NOT_LOADED:
        text = f"none, PyTorch code serves, many times slower: {WHY_NOT_LOADED}"
        is_unwanted = os.environ.get("GACT_FX_NO_EXT") == "1"
        yield Finding("CPU kernels", NOTE, text, "unset GACT_FX_NO_EXT" if is_unwanted else _REBUILD)
        return
    text = f"compiled, {cpu_capability()} instructions, from {LIBRARY}"
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    if torch.equal(compress(x, 4), reference.compress(x, 4, 256, 0, None, "stochastic")):
        yield Finding("CPU kernels", GOOD, f"{text}, the same bits as the PyTorch code")
    else:
        yield Finding("CPU kernels", MISSING, f"{text}, but other bits than the PyTorch code", _REBUILD)


def _cuda() -> Iterator[Finding]:
    nvcc = _nvcc()
    yield Finding(
        "nvcc", GOOD if nvcc else NOTE, nvcc or "none; it is needed to build CUDA kernels, and for nothing else"
    )
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without it"
        yield Finding("CUDA", NOTE, f"no device; {built}; the CPU serves")
        return
    devices = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    yield Finding("CUDA", GOOD, f"{torch.version.cuda}: {devices}")
    if has_compiled_kernels("cuda"):
        yield Finding("CUDA kernels", GOOD, "compiled")
    else:
        cure = _REBUILD if nvcc else f"install CUDA {torch.version.cuda}'s nvcc, then {_REBUILD}"
        yield Finding("CUDA kernels", NOTE, "none: Inductor fuses the PyTorch code", cure)
    try:
        yield Finding("Triton", GOOD, metadata.version("triton"))
    except metadata.PackageNotFoundError:
        yield Finding("Triton", MISSING, "none: Inductor needs it on CUDA", "pip install triton")


def _nvcc() -> str:
    """The release of nvcc, '' where there is none."""
    path = shutil.which("nvcc")
    if path is None:
        return ""
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"release (\S+?),", text)
    return f"{found[1]} ({path})" if found else ""


def _compiler(try_compiler: Callable[[], str]) -> Finding:
    name = cpp_compiler()
    failure = try_compiler()
    if not failure:
        return Finding("C++ compiler", GOOD, f"{name or 'found'}, compiles what Inductor writes")
    return Finding("C++ compiler", MISSING, f"{name or 'none found'}: {failure}", _COMPILER)
