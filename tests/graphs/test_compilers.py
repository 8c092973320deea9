"""What is asked of the inner compiler while a model is profiled."""

import logging
import threading

import pytest
import torch
from torch import nn

import gact_fx
from gact_fx.graphs import compilers


@pytest.mark.parametrize(("compiler", "is_called"), [("inductor", True), ("eager", False)])
def test_vector_instructions_are_looked_for_beside_profiling(
    compiler: str, is_called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cpu_vec_isa

    calls: list[None] = []
    look, threads = cpu_vec_isa.valid_vec_isa_list, []

    def watched() -> list[cpu_vec_isa.VecISA]:
        threads.append(threading.current_thread())
        return look()

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", watched)
    find = compilers._find_instructions
    find.cache_clear()
    monkeypatch.setattr(compilers, "_find_instructions", lambda: calls.append(find()))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    gact_fx.compile(model, sample_batches=[torch.randn(32, 64)], loss_fn=lambda m, x: m(x).sum(), inner=compiler)
    assert bool(calls) == is_called
    beside = {thread for thread in threads if thread is not threading.current_thread()}
    assert len(beside) == is_called
    for thread in beside:
        thread.join()


def test_a_failure_to_look_for_them_is_left_to_the_compilation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor import cpu_vec_isa

    def fails() -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", fails)
    compilers._find_instructions.cache_clear()
    before = set(threading.enumerate())
    with caplog.at_level(logging.DEBUG, "gact_fx"):
        compilers._find_instructions()
        for thread in set(threading.enumerate()) - before:
            thread.join()
    assert "RuntimeError: no C++ compiler" in caplog.text


def test_loops_that_old_inductor_cannot_fuse_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does to real graphs is seen in test_merge_masks.py with torch 2.11, where they failed to compile."""
    from torch._inductor.codegen.cpp import CppScheduling

    name = "_can_fuse_nodes_with_compatible_ranges"
    before = getattr(CppScheduling, name)
    if hasattr(CppScheduling, "_align_compatible_range_nodes"):
        with compilers._sound_fusion():
            assert getattr(CppScheduling, name) is before
        monkeypatch.delattr(CppScheduling, "_align_compatible_range_nodes")
    with pytest.raises(RuntimeError, match="in between"), compilers._sound_fusion():
        assert getattr(CppScheduling, name)(None, None) is False
        raise RuntimeError("in between")
    assert getattr(CppScheduling, name) is before
