"""What a step has in memory: pairs of graphs, put one after another."""

from typing import Any

from gact_fx.graphs.step_memory import Buffer, PairMemory, StepMemory


def pair(*buffers: Buffer) -> PairMemory:
    """Two calls in forward, two in backward."""
    return PairMemory(2, 2, buffers)


def buffer(start: int, end: int, nbytes: int, **more: Any) -> Buffer:
    return Buffer(start, end, nbytes, "op", "module", **more)


def test_pairs_run_forward_one_after_another_and_backward_in_reverse() -> None:
    first, second = pair(buffer(1, 2, 10)), pair(buffer(0, 3, 100))
    step = StepMemory.of([first, second], [1, 1], between=1)
    # Calls 0, 1 and 6, 7 are those of the first pair.
    assert step.levels() == [1, 11, 111, 111, 111, 111, 11, 1]
    assert (step.length, step.forward, step.activations) == (8, 4, 111)


def test_a_pair_that_runs_twice_holds_twice_and_keeps_one_gradient() -> None:
    repeated = pair(buffer(0, 2, 10), buffer(3, 3, 7, is_gradient=True))
    step = StepMemory.of([repeated], [2])
    # The gradient of the run that is last in forward comes first, and stays; the other one is added to it.
    assert step.levels() == [10, 10, 20, 20, 20, 10, 10, 7]
    assert step.levels(gradients=True) == [10, 10, 20, 20, 20, 17, 17, 14]
    assert step.gradients == 7 and step.peak == 20


def test_runs_with_parameters_of_their_own_keep_their_gradients() -> None:
    repeated = PairMemory(2, 2, (buffer(3, 3, 7, is_gradient=True),), is_tied=False)
    step = StepMemory.of([repeated], [2])
    assert step.levels(gradients=True) == [0, 0, 0, 0, 0, 7, 7, 14]
    assert step.gradients == 14 and step.activations == 0


def test_the_largest_moment_tells_what_waits_from_what_passes() -> None:
    step = StepMemory.of(
        [pair(buffer(0, 3, 5), buffer(2, 2, 3), buffer(2, 3, 4), buffer(2, 2, 9, is_gradient=True))], [1]
    )
    waiting, others = step.largest_moment()
    assert [b.nbytes for b in waiting] == [5] and [b.nbytes for b in others] == [4, 3]
    assert step.activations == 12 and step.peak == 21
