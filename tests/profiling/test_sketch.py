"""Sketches of gradients keep norms, and norms need no copy of a gradient."""

import pytest
import torch

from gact_fx.profiling.gradients import sketch, squared_norm


def test_of_few_numbers_all_are_kept() -> None:
    x = torch.randn(40, 100, dtype=torch.float64)
    found = sketch(x)
    torch.testing.assert_close(found, x.flatten(), rtol=0, atol=0)
    found.zero_()
    assert x.abs().sum() > 0


@pytest.mark.parametrize("shape", [(300, 100), (3000, 1000), (4093, 7)], ids=str)
def test_norms_of_gradients_and_of_differences(shape: tuple[int, ...]) -> None:
    """Also where all of it lies in one row, in one column, or in one element."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    row, column, element = (torch.zeros(shape) for _ in range(3))
    row[3], column[:, 5], element[1, 2] = 2.0, 3.0, 4.0
    for change in (torch.randn(shape) * 1e-3, row, column, element):
        assert squared_norm(sketch(change)) == pytest.approx(float(change.double().square().sum()), rel=0.08)
        difference = squared_norm(sketch(x + change) - sketch(x))
        assert difference == pytest.approx(squared_norm((x + change) - x), rel=0.08)


def test_complex_and_sparse_gradients() -> None:
    x = torch.randn(20, 8, dtype=torch.complex64)
    for gradient in (x, x.conj(), x.to_sparse(), torch.randn(100, 100).half()):
        expected = float(gradient.to_dense().to(torch.complex128).abs().square().sum())
        assert squared_norm(gradient) == pytest.approx(expected)
        assert squared_norm(sketch(gradient)) == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128], ids=str)
def test_gradients_are_left_as_they_are(dtype: torch.dtype) -> None:
    x = torch.randn(100, 100).to(dtype)
    before = x.clone()
    sketch(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    x = torch.zeros(10_000)
    x[7] = value
    assert not sketch(x).isfinite().all() and squared_norm(x) != squared_norm(torch.zeros(10_000))
