"""The quickest networks of benchmarks/zoo.py through its own function, so that it cannot rot."""

import pytest
import torch

pytest.importorskip("transformers", reason="the networks come from transformers")
zoo = pytest.importorskip("zoo", reason="benchmarks/ is not on the path")


@pytest.mark.parametrize(
    "name", [pytest.param("vit", marks=pytest.mark.slow), pytest.param("llama", marks=pytest.mark.slow), "sage"]
)
def test_a_network_of_the_zoo_meets_its_targets(name: str) -> None:
    if name == "sage":
        pytest.importorskip("torch_geometric", reason="the graph nets come from torch_geometric")
    found = zoo.measure(name, "eager")
    assert not found.misses(), found
    assert found.graphs >= 1 and found.eager_bytes > zoo.LARGE and found.dtype == "float32"
    assert len(set(found.losses)) == zoo.STEPS  # it trains
    # What is printed of it.
    assert name in zoo.row(name, found) and "misses" not in zoo.row(name, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "wav2vec2", "sage"])
def test_without_dropout_nothing_is_random(name: str) -> None:
    if name == "sage":
        pytest.importorskip("torch_geometric", reason="the graph nets come from torch_geometric")
    first, second = (zoo.gradients(name, torch.float32) for _ in range(2))
    assert first and all(torch.equal(first[key], second[key]) for key in first.keys() | second.keys())


@pytest.mark.slow
def test_a_large_error_is_measured_again_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_geometric", reason="the graph nets come from torch_geometric")
    monkeypatch.setattr(zoo, "MAX_ERROR", -1.0)
    error, floor, dtype = zoo._error("sage", "eager")
    assert dtype is torch.float64 and floor < 1e-9 and 1e-9 < error < 0.02
