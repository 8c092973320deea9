"""What benchmarks/peers.py compares gact_fx with, and its own parts: the hooks, the processes, the rows, the figure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gact_fx import ops

peers = pytest.importorskip("peers", reason="benchmarks/ is not on the path")
import hooks_compression  # noqa: E402
import peers_methods  # noqa: E402
import peers_plot  # noqa: E402
from peers_process import Case, Failure, Process, Surroundings, Training, gradient_error  # noqa: E402

UNET = Case("unet", "eager", small=True)


def case(method: str) -> Case:
    return Case("unet", method, small=True)


@pytest.mark.parametrize("method", ["eager", "offload", "checkpoint-eager"])
def test_exact_methods_have_eager_gradients(method: str) -> None:
    assert gradient_error(case(method))["error"] == 0.0


def test_hooks_are_noisier_at_fewer_bits() -> None:
    at_8, at_4 = (gradient_error(case(f"hooks-{bits}"))["error"] for bits in (8, 4))
    assert 0 < at_8 < 0.02 < at_4 < 0.5


@pytest.mark.slow
def test_hooks_hold_less_than_eager() -> None:
    held = {method: Training(case(method)).memory()["held"] for method in ("eager", "hooks-8", "hooks-4")}
    assert held["hooks-4"] < 0.7 * held["hooks-8"] and held["hooks-8"] < 0.5 * held["eager"]


def test_hooks_compress_a_tensor_once_and_keep_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    compressed: list[torch.Size] = []
    compress = ops.compress

    def count(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        compressed.append(x.shape)
        return compress(x, *args, **kwargs)

    monkeypatch.setattr(ops, "compress", count)
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    x = torch.randn(32, 64)
    with hooks_compression.compress_saved_tensors(model, 8):
        loss = sum(layer(x) for layer in model).square().sum()
    loss.backward()
    # x, which both layers save, and what is squared.
    assert compressed == [x.shape, x.shape]
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_hooks_keep_the_statistics_of_attention() -> None:
    """With these in few bits the gradient would be useless."""
    q, k, v = (torch.randn(2, 4, 256, 16, requires_grad=True) for _ in range(3))

    def gradient() -> torch.Tensor:
        return torch.autograd.grad(nn.functional.scaled_dot_product_attention(8 * q, k, v).square().sum(), v)[0]

    exact = gradient()
    with hooks_compression.compress_saved_tensors(nn.Identity(), 8):
        found = gradient()
    assert 0 < (found - exact).norm() / exact.norm() < 0.1


def test_masks_come_back_exactly() -> None:
    x = torch.randn(4096, requires_grad=True)
    mask = torch.rand(4096) < 0.5
    with hooks_compression.compress_saved_tensors(nn.Identity(), 4):
        y = torch.where(mask, x, 0.0).sum()
    assert torch.equal(torch.autograd.grad(y, x)[0], mask.float())


def test_checkpointing_needs_layers_that_it_knows() -> None:
    with pytest.raises(ValueError, match="no layer of Linear"):
        peers_methods.checkpoint_layers(nn.Linear(2, 2))


def test_memory_counts_gradients_and_what_is_held() -> None:
    found = Training(UNET).memory()
    parameters = sum(p.nbytes for p in Training(UNET).model.parameters())
    # The second block of each width is the first to need attention: its weights have no gradient where it has none.
    assert 0.5 * parameters < found["gradients"] <= parameters
    assert found["held"] < found["peak"] and found["gradients"] < found["peak"]


@pytest.mark.slow
def test_a_process_says_why_it_fails(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:
        around = Surroundings(str(tmp_path), log, 300)
        with Process(Case("no such network", "eager"), around) as process, pytest.raises(Failure, match="KeyError"):
            process.ask("memory")
        hasty = Surroundings(str(tmp_path), log, 0.01)
        with Process(UNET, hasty) as process, pytest.raises(Failure, match=r"no answer within 0\.01 s"):
            process.ask("memory")
    assert "Traceback" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setenv("GACT_FX_RESULTS", str(tmp_path))
    asked = ["peers.py", "unet", "--small", "--turns", "1", "--limit", "600", "--methods"]
    monkeypatch.setattr(peers, "REFERENCE", "eager")  # compiles nothing
    monkeypatch.setattr(sys, "argv", [*asked, "eager", "--without-time", "--without-error"])
    peers.main()
    assert peers.saved("peers-fp32-small")["unet"]["eager"].keys() & {"peak", "seconds", "error"} == {"peak"}
    monkeypatch.setattr(sys, "argv", [*asked, "eager", "--without-error", "--resume"])
    peers.main()
    timed = peers.saved("peers-fp32-small")["unet"]["eager"]
    assert timed.keys() & {"peak", "seconds", "error"} == {"peak", "seconds"}
    monkeypatch.setattr(sys, "argv", [*asked, "eager", "hooks-8", "--resume"])
    peers.main()
    first = peers.saved("peers-fp32-small")["unet"]
    assert list(first) == ["eager", "hooks-8"] and first["eager"]["error"] == 0.0 < first["hooks-8"]["error"]
    assert first["eager"] == {**timed, "error": 0.0}, "only the error was not there yet"
    assert "hooks, 8 bits" in capfd.readouterr().out
    # Nothing is measured twice.
    monkeypatch.setattr(peers, "measure", lambda *args: pytest.fail("it was there already"))
    peers.main()
    assert peers.saved("peers-fp32-small")["unet"] == first


def rows() -> dict[str, dict[str, Any]]:
    peaks = {key: 1e9 - 4e7 * number for number, key in enumerate(peers_methods.METHODS)}
    found: dict[str, dict[str, Any]] = {
        key: {"label": peers_methods.METHODS[key].label, "peak": peak, "gradients": 2e8, "ratio": 1 + peak / 2e9,
              "seconds": 1.0, "held": peak / 2, "error": 0.1, "times": 1}
        for key, peak in peaks.items()
    }  # fmt: skip
    found["offload"]["ratio"] = 7.0
    found["fp8"] = {"label": "fp8 pass", "times": 1, "failed": "it needs a GPU"}
    return found


def test_a_failed_row_or_another_batch_is_measured_again() -> None:
    found = rows()
    assert peers.taken_up(found["eager"], 1) == found["eager"]
    assert peers.taken_up(found["eager"], 4) == peers.taken_up(found["fp8"], 1) == peers.taken_up(None, 1) == {}


def test_a_row_says_why_it_failed() -> None:
    assert peers.describe_row("bert", rows()["fp8"]).endswith("it needs a GPU")
    assert "1000.0" in peers.describe_row("bert", rows()["eager"])


def test_the_figure_has_every_method_that_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="it draws the figure")
    path = tmp_path / "peers.png"
    peers_plot.draw({"bert": rows(), "unet": rows(), "gpt2": {"fp8": rows()["fp8"]}}, path, "a machine", "fp32")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RuntimeError, match="nothing to draw"):
        peers_plot.draw({"unet": {"fp8": rows()["fp8"]}}, path, "a machine", "fp32")
    points = {point.key: point for point in peers_plot.points_of(rows(), 1e6)}
    assert points.keys() == peers_methods.METHODS.keys() - {"fp8"}
    assert points["offload"].is_slow and points["offload"].label == "save_on_cpu (7.0x)"
    assert points["gact-8"].label == "gact_fx, 8 bits" and points["gact-4"].label == "gact_fx, 4 bits"
