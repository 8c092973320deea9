"""``python -m gact_fx``: reports on plans, and the doctor."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Mixed, mixed_batch

import gact_fx
from gact_fx.__main__ import main
from gact_fx.codec.operators import LIBRARY, has_compiled_kernels
from gact_fx.diagnostics import doctor
from gact_fx.diagnostics.doctor import Finding, describe, examine
from gact_fx.graphs import toolchain
from gact_fx.graphs.compilers import cpp_compiler


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    found = gact_fx.inspect(gact_fx.compile(Mixed(), inner="eager", sample_batches=[mixed_batch(32)])).plan
    assert found is not None
    found.save(path)
    return path


def test_a_plan_is_printed(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(plan)]) == 0
    text = capsys.readouterr().out
    found = gact_fx.Plan.load(plan)
    assert all(entry.key in text for graph in found.graphs for entry in graph.tensors)
    assert "budget: 4 bits per element" in text and found.graphs[0].fingerprint in text
    lines = text.partition("graph  tensor")[2].splitlines()
    shares = [float(match[1]) for line in lines if (match := re.search(r"([\d.]+) %", line))]
    assert sum(shares) == pytest.approx(100, abs=3)


@pytest.mark.parametrize("text", [None, "not JSON", "[]", '{"format": 1}', '{"format": 2}'])
def test_a_missing_or_wrong_file_is_one_line(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    assert main(["report", str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and str(path) in err


def test_a_directory_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error(plan: Path) -> None:
    command = f"{sys.executable} -m gact_fx report {plan} | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout == "a" and not done.stderr


def test_the_doctor_finds_a_working_installation_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: examine(lambda: ""))
    monkeypatch.setattr("gact_fx.__main__.examine", lambda: examine(lambda: ""))
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for name in ("Python", "gact_fx", "torch", "CPU kernels", "nvcc", "CUDA", "C++ compiler"):
        assert name in text
    assert "has what it needs" in text


def test_a_compiler_that_does_not_work_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gact_fx.__main__.examine", lambda: examine(lambda: "No working C++ compiler found"))
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "No working C++ compiler found" in text and "g++" in text
    assert text.splitlines()[-1] == "gact_fx needs, and does not find: C++ compiler"


def test_a_torch_that_is_too_old_is_missing_and_one_too_new_is_told() -> None:
    assert doctor._torch("2.10.1").status == "missing" and "torch>=2.11" in doctor._torch("2.10.1").cure
    assert doctor._torch("2.13.0+cpu").status == "ok"
    assert doctor._torch("2.14.0a0+git123").status == "note"


def test_without_kernels_the_doctor_says_how_to_build_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "WHY_NOT_LOADED", "the library is for another machine")
    (finding,) = doctor._kernels()
    assert finding.status == "note" and "pip install" in finding.cure and "slower" in describe([finding])
    assert "the library is for another machine" in finding.text


def test_the_doctor_names_the_library_and_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_compiled_kernels("cpu"):
        pytest.skip("the library is not built")
    monkeypatch.setattr(doctor, "cpu_capability", lambda: "avx2")
    (finding,) = doctor._kernels()
    assert finding.status == "ok" and str(LIBRARY) in finding.text and "avx2" in finding.text


def test_kernels_that_give_other_bits_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_compiled_kernels("cpu"):
        pytest.skip("the library is not built")
    monkeypatch.setattr(doctor, "compress", lambda x, bits: x)
    (finding,) = doctor._kernels()
    assert isinstance(finding, Finding) and finding.status == "missing"


def test_a_compiler_that_may_not_be_run_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    def refuse() -> str:
        raise PermissionError(13, "Permission denied", "g++")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", refuse)
    finding = doctor._compiler(lambda: "it does not run")
    assert finding.status == "missing" and finding.text == "none found: it does not run" and "CXX" in finding.cure


@pytest.mark.slow
def test_the_compiler_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpp_compiler() and not toolchain.compilation_failure()
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    assert "compiler" in toolchain.compilation_failure()
