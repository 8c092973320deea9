"""The examples, briefly: they run, learn, and hold less."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gact_fx.passes import split_cross_entropy

train_digits = pytest.importorskip("train_digits", reason="needs scikit-learn and matplotlib")
comparison = pytest.importorskip("comparison", reason="needs matplotlib")

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("model", ["residual CNN", pytest.param("vision transformer", marks=pytest.mark.slow)])
def test_digits_learn_with_compressed_activations(model: str, tmp_path: Path) -> None:
    results = [train_digits.run(model, compressed, epochs=12, inner="eager") for compressed in (False, True)]
    plain, compressed = results
    assert plain.value > 0.9 and compressed.value > plain.value - 0.03
    assert plain.held_bytes / compressed.held_bytes > 3
    comparison.draw(results, "test accuracy", str(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert len(comparison.table(results, "test accuracy").splitlines()) == 3


@pytest.mark.slow
def test_bert_on_a_text_file(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="BERT comes from transformers")
    (tmp_path / "text.txt").write_text((ROOT / "CHANGELOG.md").read_text() * 4)
    command = [sys.executable, str(ROOT / "examples" / "finetune_transformer.py"), "--inner", "eager", "--steps", "3"]
    options = ["--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "bert.png")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "gact_fx, 4 bits" in done.stdout and (tmp_path / "bert.png").exists()


@pytest.mark.slow
def test_bert_without_its_text(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="BERT comes from transformers")
    command = [sys.executable, str(ROOT / "examples" / "finetune_transformer.py"), "--text", str(tmp_path / "none.txt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "cannot read --text" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_quickstart() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "examples" / "quickstart.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "held for backward:" in done.stdout


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The linear layers whose logits are returned as NaN from now on."""
    found: list[Any] = []
    empty = split_cross_entropy._return_nothing

    def watched(graph: Any, linear: Any) -> None:
        found.append(linear)
        empty(graph, linear)

    monkeypatch.setattr(split_cross_entropy, "_return_nothing", watched)
    return found


@pytest.mark.slow
def test_a_language_model_of_transformers(emptied: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
    with caplog.at_level("WARNING", "gact_fx"):
        loss, report = importlib.import_module("train_with_hf_trainer").train(inner="eager")
    # Guessing among the tokens that occur has 6.2.
    assert loss < 1 and report.ratio > 5 and emptied and not caplog.text


@pytest.mark.slow
def test_a_language_model_in_lightning(emptied: list[Any]) -> None:
    pytest.importorskip("lightning")
    accuracy, report = importlib.import_module("train_with_lightning").train(steps=20, inner="eager")
    assert accuracy > 0.2 and report.ratio > 5 and emptied
