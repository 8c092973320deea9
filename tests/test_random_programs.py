"""Random programs of ordinary operators: no gradient is off by more than three times what its plan predicts."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_programs import NAMES, Step, judge_program, steps_of, text

STEP = st.tuples(st.integers(0, len(NAMES) - 1), st.integers(0, 59), st.integers(0, 59))
FINE = ("right", "unstable")
# Found wrong once: a power whose base codes made negative, behind a write in place (1022), where nothing moves the
# gradient (2564, 2567), or where its decisions take other tensors (2287); a decision that read what was dropped (2304);
# decisions that were taken again, measured in a graph that had them stored (1000410); the sum of two tensors below
# zero, though neither alone brings it there (1000571); blobs that backward did not read (1000735, 1001037).
FOUND = (1022, 2304, 2564, 2567, 5537, 10357, 1000410, 1000571, 1000735, 1001037, 1001222)
# Operators were added since.
KNOWN = NAMES.index("detach, bent")
# Found with those: an element next to a jump, which 5 bits cross and 8 do not (7003164); a pole behind another one,
# which two tensors lead to together (7007171).
FOUND_SINCE = (7003164, 7007171)


# In the fast tier, half of those that were found first.
@pytest.mark.parametrize(
    "seed", [*FOUND[::2], *(pytest.param(seed, marks=pytest.mark.slow) for seed in FOUND[1::2]), *FOUND_SINCE]
)
def test_what_was_wrong_once(seed: int) -> None:
    steps = steps_of(seed) if seed in FOUND_SINCE else steps_of(seed, KNOWN)
    verdict = judge_program(steps)
    assert verdict.kind in FINE, f"{verdict}\n{text(steps)}"


@pytest.mark.parametrize("recompute", ["off", "full"])
@pytest.mark.parametrize("seed", [pytest.param(5, marks=pytest.mark.slow), 6, 7])
def test_programs_that_recompute_otherwise(seed: int, recompute: str) -> None:
    verdict = judge_program(steps_of(seed), recompute=recompute)
    assert verdict.kind in FINE, f"{verdict}\n{text(steps_of(seed))}"


@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4))])
def test_programs_of_known_seeds(seed: int, bits: int) -> None:
    verdict = judge_program(steps_of(seed), bits)
    assert verdict.kind in FINE, f"{verdict}\n{text(steps_of(seed))}"


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEP, min_size=5, max_size=25))
def test_programs_that_hypothesis_draws(steps: list[Step]) -> None:
    verdict = judge_program(steps)
    assert verdict.kind in FINE, f"{verdict}\n{text(steps)}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 105))
def test_programs_compiled_by_inductor(seed: int) -> None:
    verdict = judge_program(steps_of(seed), inner="inductor")
    assert verdict.kind in FINE, f"{verdict}\n{text(steps_of(seed))}"
