"""What the benchmarks ran on, and where their results go."""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch


def processor() -> str:
    """The processor's name as the system gives it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    if info.exists() and (found := re.search(r"model name\s*: (.+)", info.read_text())):
        return found.group(1).strip()
    return platform.processor() or platform.machine()


def describe() -> str:
    """One line: processor, threads, PyTorch."""
    isa = torch.backends.cpu.get_cpu_capability()
    return f"{processor()} ({isa}), {os.cpu_count()} cores, torch {torch.__version__}"


def results_path(name: str) -> Path:
    """The JSON of a benchmark on this processor; GACT_FX_RESULTS names another folder than benchmarks/results."""
    slug = re.sub(r"[^a-z0-9]+", "-", processor().lower()).strip("-")
    folder = os.environ.get("GACT_FX_RESULTS") or Path(__file__).parent / "results"
    return Path(folder) / f"{'gpu-' * torch.cuda.is_available()}{name}-{slug}.json"


def save(name: str, results: dict[str, Any]) -> Path:
    """Write ``results`` as JSON beside the benchmarks, named by benchmark and processor."""
    path = results_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": describe(), "results": results}, indent=1) + "\n")
    return path


def saved(name: str) -> dict[str, Any]:
    """The results that `save` wrote on a machine like this one, with this PyTorch; none if there are none."""
    path = results_path(name)
    found = json.loads(path.read_text()) if path.exists() else {}
    results: dict[str, Any] = found["results"] if found.get("machine") == describe() else {}
    return results
