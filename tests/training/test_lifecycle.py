"""The states of a compiled model: which follow which, what is compiled for them, and when it is exchanged."""

import pytest
import torch

from gact_fx.training.lifecycle import Lifecycle, State


def running(state: State, calls: list[State]) -> Lifecycle:
    """A lifecycle that runs the name of its state, noting in ``calls`` what it compiles."""
    lifecycle = Lifecycle(state)

    def compile(state: State) -> object:
        calls.append(state)
        return lambda: state.value

    lifecycle.run(compile)  # type: ignore[arg-type]
    return lifecycle


def test_only_a_new_plan_is_compiled_anew() -> None:
    calls: list[State] = []
    lifecycle, found = running(State.PROFILING, calls), []
    found.append(lifecycle())
    lifecycle.planned()
    found.append(lifecycle())
    for plans in (False, True):
        lifecycle.profile_again(True)
        lifecycle.profile_again(True)
        found.append(lifecycle())
        lifecycle.profile_again(False)
        if plans:
            lifecycle.planned()
        found.append(lifecycle())
    assert found == ["profiling", "planned"] + ["profiling again", "planned"] * 2
    assert calls == [State.PROFILING, State.PLANNED, State.PROFILING_AGAIN, State.PLANNED]


def test_what_runs_is_exchanged_outside_of_backward() -> None:
    """What comes before a call may change the state, and does not run in backward."""
    lifecycle, found = running(State.PROFILING, []), []

    class Planned(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
            lifecycle.planned()
            found.append(lifecycle())
            return gradients[0]

    lifecycle.before_calls(lambda: found.append("before"))
    found.append(lifecycle())
    Planned.apply(torch.ones((), requires_grad=True)).backward()  # type: ignore[no-untyped-call]
    assert found == ["before", "profiling", "profiling"]
    lifecycle.before_calls(lambda: lifecycle.profile_again(True))
    assert lifecycle() == "profiling again"


@pytest.mark.parametrize("state", [State.FAILED, State.UNCOMPRESSED])
def test_what_is_uncompressed_is_not_profiled_again(state: State) -> None:
    with pytest.raises(AssertionError, match=f"{state.value} is not followed by profiling again"):
        Lifecycle(state).profile_again(True)


def test_other_ranks_may_have_a_plan_where_this_one_failed() -> None:
    lifecycle = running(State.PROFILING, [])
    lifecycle.failed()
    assert lifecycle() == "failed"
    lifecycle.failed()
    lifecycle.planned()
    assert lifecycle() == "planned"
