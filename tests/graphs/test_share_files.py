"""Kernels of a graph share C++ files, and compute what they compute in files of their own."""

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache

from gact_fx.graphs.share_files import Kernel, deal, shared_files

SOURCE = (
    '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C"  void  kernel(const float* in_ptr0,\n  const int64_t ks0)'
)


def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Products with loops between, none of which is another one: eight kernels."""
    for scale in range(8):
        x = (x @ weight + scale).tanh() * (scale + 1)
    return x


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The source code of each file that Inductor compiles, in this test alone."""
    seen: list[str] = []
    usual = vars(CppPythonBindingsCodeCache)["load_pybinding_async"].__func__

    def load(cls: Any, argtypes: Any, main_code: str, *args: Any, **kwargs: Any) -> Any:
        seen.append(main_code)
        return usual(cls, argtypes, main_code, *args, **kwargs)

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding_async", classmethod(load))
    torch._dynamo.reset()
    yield seen
    torch._dynamo.reset()


@pytest.mark.parametrize(("workers", "dynamic"), [(1, False), (2, False), (2, True)])
def test_kernels_share_files_and_compute_the_same(files: list[str], workers: int, dynamic: bool) -> None:
    x, weight = torch.randn(32, 16), torch.randn(16, 16) / 16
    options = {"force_disable_caches": True, "compile_threads": workers, "fx_graph_cache": False}
    with config.patch(options):
        alone = torch.compile(program, dynamic=dynamic)(x, weight)
        assert len(files) == 8
        torch._dynamo.reset()
        with shared_files():
            shared = torch.compile(program, dynamic=dynamic)
            assert shared(x, weight).equal(alone)
    assert len(files) - 8 == 2 * workers
    assert sum(source.count("static void kernel_") for source in files[8:]) == 8
    torch.testing.assert_close(alone, program(x, weight))


def test_a_wrong_number_of_arguments_is_an_error() -> None:
    x, y = torch.randn(32), torch.empty(32)
    compiler = AsyncCompile()
    with config.patch(compile_threads=1), shared_files():
        scope = {"double": compiler.cpp_pybinding(["const float*", "float*"], _doubling(x.numel()))}
        compiler.wait(scope)
    scope["double"](x, y)
    assert y.equal(2 * x)
    with pytest.raises(RuntimeError, match="takes 2 arguments"):
        scope["double"](x)


@pytest.mark.slow
def test_graphs_from_the_cache_find_their_files(tmp_path: Path) -> None:
    """In a new process, with what shares files and without."""
    script = """
import contextlib, sys, torch
from torch._dynamo.utils import counters
from gact_fx.graphs.share_files import shared_files
from test_share_files import program
torch.manual_seed(0)
x, weight = torch.randn(32, 16), torch.randn(16, 16) / 16
with shared_files() if sys.argv[1] == "shared" else contextlib.nullcontext():
    torch.testing.assert_close(torch.compile(program)(x, weight), program(x, weight))
print(counters["inductor"]["fxgraph_cache_hit"])
"""
    paths = ":".join([str(Path(__file__).parent), *(path for path in sys.path if path)])
    environment = {"PATH": "/usr/bin:/bin", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    hits, files = [], []
    for way in ("shared", "shared", "alone", "shared"):
        run = subprocess.run(
            [sys.executable, "-c", script, way], env=environment, capture_output=True, text=True, check=True
        )
        hits.append(int(run.stdout.splitlines()[-1]))
        files.append(len(list(tmp_path.rglob("*.main.so"))))
    assert hits == [0, 1, 1, 1]
    assert files[1] == files[0]
    assert files[2] - files[0] == 8
    assert files[3] == files[2]


@pytest.mark.parametrize(
    ("before", "within"),
    [
        ("inline void helper() {}\n", ""),
        ("#include <vector>\n", ""),
        ("", "\n#define TWICE 2\n"),
        ("", '}\nextern "C" void other() {'),
    ],
)
def test_a_kernel_with_more_around_it_keeps_its_file(before: str, within: str) -> None:
    prefix, kernel = SOURCE.split("\n", 1)
    assert Kernel.of(["const float*"], f"{prefix}\n{kernel}\n{{{{}}}}\n") is not None
    assert Kernel.of(["const float*"], f"{prefix}\n{before}{kernel}\n{{{within}}}\n") is None


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_files_are_of_about_equal_length(count: int) -> None:
    lengths = {f"cpp_fused_{i}": 100 + (i * 37) % 60 for i in range(31)}
    files = deal(lengths, count)
    assert sorted(name for names in files for name in names) == sorted(lengths)
    sums = [sum(lengths[name] for name in names) for names in files]
    assert len(files) == count
    assert max(sums) <= math.ceil(sum(sums) / count) + max(lengths.values())
    assert deal({"cpp_fused_0": 3}, 8) == [["cpp_fused_0"]]
    assert deal({}, 8) == []


def test_what_was_replaced_is_put_back() -> None:
    before = AsyncCompile.cpp_pybinding, AsyncCompile.wait
    with pytest.raises(ValueError, match="within"), shared_files():
        assert AsyncCompile.wait is not before[1]
        raise ValueError("within")
    assert (AsyncCompile.cpp_pybinding, AsyncCompile.wait) == before


def _doubling(numel: int) -> str:
    return f"""#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(const float* in_ptr0, float* out_ptr0)
{{
    for (int64_t i = 0; i < {numel}; ++i) out_ptr0[i] = 2 * in_ptr0[i];
}}
"""
