"""Masks of random numbers: the kernel against PyTorch code, and both against what Inductor draws."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gact_fx.codec import operators
from gact_fx.graphs import draw_mask as module

operator = torch.ops.gact_fx.draw_mask.default
SEEDS = (0, 1, -5, 2**31, 2**32 + 7, 123456789012345, 2**63 - 1)
needs_kernels = pytest.mark.skipif(bool(operators.WHY_NOT_LOADED), reason=operators.WHY_NOT_LOADED)


@needs_kernels
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    size=st.lists(st.integers(0, 12), max_size=3),
    threshold=st.floats(-0.1, 1.1) | st.sampled_from([0.0, 0.1, 0.5, 1.0, float("nan"), float("inf")]),
)
@example(seed=2**32 + 7, size=[100_003], threshold=0.1)
def test_the_kernel_draws_as_the_reference_does(seed: int, size: list[int], threshold: float) -> None:
    found, expected = (
        operator(torch.tensor(seed), size, threshold),
        module.draw_mask(torch.tensor(seed), size, threshold),
    )
    assert found.dtype == torch.bool and list(found.shape) == size
    assert torch.equal(found, expected)


@needs_kernels
def test_the_kernel_draws_everywhere_as_the_reference_does() -> None:
    """Also run once per instruction set."""
    for seed in SEEDS:
        for numel in (1, 31, 32, 33, 70_001):
            assert torch.equal(
                operator(torch.tensor(seed), [numel], 0.3), module.draw_mask(torch.tensor(seed), [numel], 0.3)
            )


@needs_kernels
def test_a_seed_is_one_int64() -> None:
    for seed in (torch.tensor([1, 2]), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="seed must be one int64"):
            operator(seed, [3], 0.5)


@pytest.mark.parametrize("draw", [operator, module.draw_mask])
def test_they_are_the_numbers_that_inductor_draws(draw: object) -> None:
    @torch.compile
    def numbers(seed: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.prims.inductor_random.default([37, 211], seed, "rand")
        return found

    for seed in map(torch.tensor, SEEDS):
        drawn = numbers(seed)
        # At the numbers themselves, where a threshold that is off by the least would tell.
        for threshold in (0.1, 0.5, *drawn.flatten()[:5].tolist()):
            assert torch.equal(draw(seed, [37, 211], threshold), drawn > threshold)  # type: ignore[operator]


def test_a_mask_of_a_symbolic_size() -> None:
    @torch.compile(dynamic=True, fullgraph=True)
    def drawn(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        return x * operator(seed, x.shape, 0.5)

    for rows in (3, 5):
        seed = torch.tensor(9)
        assert torch.equal(drawn(torch.ones(rows, 100), seed) != 0, module.draw_mask(seed, (rows, 100), 0.5))
