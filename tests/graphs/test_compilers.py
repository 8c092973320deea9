"""What is asked of the inner compiler while a model is profiled."""

import logging
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gact_fx
from gact_fx.graphs import compilers
from gact_fx.graphs.mended_inductor import mended_inductor


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
        with mended_inductor():
            assert getattr(CppScheduling, name) is before
        monkeypatch.delattr(CppScheduling, "_align_compatible_range_nodes")
    with pytest.raises(RuntimeError, match="in between"), mended_inductor():
        assert getattr(CppScheduling, name)(None, None) is False
        raise RuntimeError("in between")
    assert getattr(CppScheduling, name) is before


@pytest.mark.parametrize("is_trained", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_strides_that_inductor_cannot_compare_are_compared(is_trained: bool) -> None:
    """Of plain torch.compile; what it does to ours is seen in test_dynamic_shapes.py."""
    from torch._inductor import config, ir

    def mix(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(x, weight, stride=2, padding=1)
        rows = x.flatten(2).transpose(1, 2)
        mixed = (rows @ rows.transpose(1, 2)).tanh() @ rows
        return F.conv2d(mixed.transpose(1, 2).reshape(x.shape), weight)

    x, weight = torch.randn(2, 4, 16, 12), torch.randn(4, 4, 3, 3, requires_grad=is_trained)
    before = ir.get_fill_order, ir.Layout.__dict__.get("_stride_expr_ge_or_false")
    # Its cache would have what was compiled here before.
    with mended_inductor(), config.patch(force_disable_caches=True):
        found = torch.compile(mix, dynamic=True)(x, weight)
    assert (ir.get_fill_order, ir.Layout.__dict__.get("_stride_expr_ge_or_false")) == before
    wanted = mix(x, weight)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    if is_trained:
        found, wanted = (torch.autograd.grad(y.square().mean(), weight)[0] for y in (found, wanted))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_blocks_that_repeat_share_what_inductor_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is a model of its own with its own plan; where the plans agree, so do the graphs."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)])
    x = torch.randn(32, 64)

    def step() -> None:
        blocks(x).square().mean().backward()

    gact_fx.compile(blocks[1], budget_bits=4)
    step()
    step()
    plan = gact_fx.inspect(blocks[1]).plan
    for block in (blocks[0], blocks[2], blocks[3]):
        gact_fx.compile(block, plan=plan)
    before = counters["inductor"]["fxgraph_cache_hit"]
    step()
    # The first block has no gradient of its input.
    assert counters["inductor"]["fxgraph_cache_hit"] == before + 4
    assert all(gact_fx.inspect(block).plan == plan for block in blocks)
