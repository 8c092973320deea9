"""What autograd is given and gives, one derivative at a time."""

import weakref

import torch

from gact_fx.graphs.differentiable import Derivative


def test_derivatives_are_those_of_autograd() -> None:
    x, y = torch.randn(5), torch.randn(5)
    taken: dict[str, torch.Tensor] = {}
    derivative = Derivative()
    a = derivative.begin(x, lambda slope: taken.update(x=slope))
    b = derivative.begin(y, lambda slope: taken.update(y=slope))
    slopes = {"product": torch.randn(5), "sum": torch.randn(5)}
    derivative.end(a * b, lambda: slopes["product"])
    derivative.end(a + a, lambda: slopes["sum"])
    derivative.run(again=True)
    assert torch.equal(taken["x"], slopes["product"] * y + 2 * slopes["sum"])
    assert torch.equal(taken["y"], slopes["product"] * x)
    slopes["product"] = torch.zeros(5)
    derivative.run(again=False)
    assert torch.equal(taken["x"], 2 * slopes["sum"])


def test_a_derivative_is_let_go_of_before_the_next_is_asked_for() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def seen(slope: torch.Tensor) -> torch.Tensor:
        nonlocal most
        alive.append(weakref.ref(slope))
        most = max(most, sum(each() is not None for each in alive))
        return slope

    derivative = Derivative()
    for _ in range(6):
        begun = derivative.begin(torch.randn(5), lambda slope: None)
        derivative.end(begun.sin(), lambda: seen(torch.randn(5)))
    derivative.run(again=False)
    assert len(alive) == 6
    assert most == 1


def test_nothing_to_end_with_is_nothing_to_do() -> None:
    taken: list[torch.Tensor] = []
    derivative = Derivative()
    derivative.begin(torch.randn(5), taken.append)
    derivative.run(again=False)
    assert not taken
