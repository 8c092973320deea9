"""What profiling has freed is given back to the system before the planned graphs are compiled."""

import platform
import subprocess
import sys

import pytest
from conftest import Mixed, mixed_batch

import gact_fx
from gact_fx.training import freed_memory
from gact_fx.training.model import session_of

# 100 MB of blocks that come from the heap, behind which another one lives.
PROGRAM = """
from pathlib import Path
from gact_fx.training.freed_memory import give_back

def resident():
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

blocks = [bytearray(100_000) for _ in range(1000)]
last = bytearray(100_000)
blocks.clear()
before = resident()
give_back()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what lies below what lives")
def test_freed_memory_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 50e6


@pytest.mark.slow
def test_it_is_given_back_before_every_plan_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(freed_memory, "give_back", lambda: calls.append(""))
    model = gact_fx.compile(Mixed(), inner="eager", sample_batches=[mixed_batch()])
    session = session_of(model)
    assert session is not None and session.plan is not None and not calls
    for plans in range(1, 3):
        for _ in range(2):
            model(*mixed_batch()).backward()
        assert len(calls) == plans
        session.adopt(session.plan)


def test_another_c_library_has_nothing_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    freed_memory._malloc_trim.cache_clear()
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert freed_memory._malloc_trim() is None
    freed_memory.give_back()
    freed_memory._malloc_trim.cache_clear()
