"""The documented figures on real architectures: bytes held, and gradients at 8 bits. Minutes, not seconds."""

import pytest
import torch

pytest.importorskip("transformers", reason="the networks come from transformers")
gradient_benchmark = pytest.importorskip("gradients")
memory_benchmark = pytest.importorskip("memory")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ratio"), [("bert", 15), ("gpt2", 20), ("resnet50", 13)])
def test_bytes_held_at_4_bits(name: str, ratio: float) -> None:
    found, predicted = memory_benchmark.at(4.0, name)
    assert memory_benchmark.without(name, compiled=False) / found >= ratio
    assert predicted == pytest.approx(found, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet50"])
def test_gradient_error_at_8_bits_against_eager(name: str) -> None:
    """With the eager inner compiler, whose uncompressed gradients are eager's to the last bits."""
    found = gradient_benchmark.measure(name, budget_bits=8, inner="eager")
    assert found["floor"] < 1e-4
    assert found["against eager"] < 0.01
    torch._dynamo.reset()
