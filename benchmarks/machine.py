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


def save(name: str, results: dict[str, Any]) -> Path:
    """Write ``results`` as JSON beside the benchmarks, named by benchmark and processor."""
    slug = re.sub(r"[^a-z0-9]+", "-", processor().lower()).strip("-")
    path = Path(__file__).parent / "results" / f"{name}-{slug}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": describe(), "results": results}, indent=1) + "\n")
    return path
