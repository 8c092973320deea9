"""Which training steps are recorded."""

from collections.abc import Callable

import torch
from torch import nn

from gact_fx.config import Config
from gact_fx.profiling.recorder import LeafGradients, Recorder, Recordings
from gact_fx.training.backend import Backend
from gact_fx.training.session import Session


class Watched:
    """A compiled layer, and which steps were handed over: their number of graphs and the scale of their loss."""

    def __init__(
        self,
        every: int | None,
        consecutive: int = 1,
        model: nn.Module | None = None,
        on_next: Callable[[bool], None] = lambda is_due: None,
    ) -> None:
        self.found: list[tuple[int, list[torch.Tensor]]] = []
        self.recorder = Recorder(self.take, every, consecutive, on_next)
        session = Session(Config(min_elements=64, inner="eager"))
        self.model = model or nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh())
        backend = Backend(session, interpreted=True, recorder=self.recorder)
        self.run = torch.compile(lambda x: self.model(x), backend=backend)

    def take(self, recordings: Recordings, gradients: LeafGradients) -> bool:
        steps = [step for recording in recordings for step in recording()]
        self.found.append((len(steps), list(gradients.values())))
        return True

    def step(self, scale: float) -> torch.Tensor:
        """A loss whose gradient is ``scale`` times that of scale 1."""
        loss: torch.Tensor = self.run(X).sum() * scale
        loss.backward()
        return loss

    def scales(self) -> list[float]:
        """Of the recorded steps."""
        first = self.found[0][1][0].norm()
        return [round(float(gradients[0].norm() / first), 3) for _, gradients in self.found]


X = torch.randn(8, 16)


def recorded(every: int | None, consecutive: int, steps: int) -> list[int]:
    """Numbers of the recorded steps among ``steps``, counted from 1."""
    watched = Watched(every, consecutive)
    found = []
    for number in range(1, steps + 1):
        before = len(watched.found)
        watched.step(1.0)
        found += [number] * (len(watched.found) - before)
    return found


def test_every_so_many_steps() -> None:
    assert recorded(1, 1, 3) == [1, 2, 3]
    assert recorded(4, 1, 9) == [4, 8]
    assert recorded(4, 2, 10) == [3, 4, 7, 8]
    assert recorded(2, 2, 4) == [1, 2, 3, 4]
    assert recorded(None, 1, 3) == []


def test_of_the_steps_before_only_the_gradients_are_handed_over() -> None:
    watched = Watched(3, 2)
    for _ in range(6):
        watched.step(1.0)
    assert [(count, len(gradients)) for count, gradients in watched.found] == [(0, 1), (1, 1)] * 2


def test_what_comes_next_is_announced() -> None:
    heard: list[bool] = []
    watched = Watched(3, 2, model=Two(), on_next=heard.append)
    for _ in range(7):
        sum(y.sum() for y in watched.run(X)).backward()
    assert heard == [False, True, False] * 2 + [False]


def test_started_by_hand_it_records_until_taken() -> None:
    watched = Watched(None)
    watched.step(1.0)
    watched.recorder.start()
    watched.step(1.0)
    assert len(watched.recorder.take()) == 1
    assert watched.recorder.take() == [] and not watched.found


def test_gradients_are_copies() -> None:
    watched = Watched(1)
    watched.step(1.0)
    watched.step(2.0)  # adds to .grad in place
    assert watched.scales() == [1, 2]


def test_stopped_it_records_nothing() -> None:
    watched = Watched(1)
    watched.step(1.0)
    watched.recorder.stop()
    watched.step(1.0)
    assert len(watched.found) == 1


def test_forward_passes_without_backward_are_no_steps() -> None:
    watched = Watched(1)
    for _ in range(20):  # validation that forgot no_grad
        watched.run(X)
    watched.step(1.0)
    watched.run(X)  # ends the step before
    assert [count for count, _ in watched.found] == [1]
    watched.step(3.0)
    watched.run(X)
    assert watched.scales() == [1, 3]


def test_several_forward_passes_before_one_backward() -> None:
    """Of a siamese model: one step with both passes, in the order of forward."""
    watched = Watched(1)
    (watched.run(X).sum() + watched.run(2 * X).sum()).backward()
    watched.run(X)
    assert [count for count, _ in watched.found] == [2]
    (found,) = watched.found[0][1]
    gradient = next(watched.model.parameters()).grad
    assert gradient is not None
    torch.testing.assert_close(found, gradient.flatten().double())


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.a(x).tanh()
        torch._dynamo.graph_break()
        return first, self.b(x).tanh()


def test_a_graph_without_backward_is_not_waited_for() -> None:
    watched = Watched(1, model=Two())
    for _ in range(2):
        watched.run(X)[1].sum().backward()
    # The first step ends when the second one begins.
    assert [count for count, _ in watched.found] == [1]
    watched.run(X)
    assert [count for count, _ in watched.found] == [1, 1]


def test_all_graphs_of_a_step_belong_to_it() -> None:
    watched = Watched(2, model=Two())
    for _ in range(4):
        sum(y.sum() for y in watched.run(X)).backward()
    assert [count for count, _ in watched.found] == [2, 2]


def test_steps_are_counted_on_when_the_model_is_traced_again() -> None:
    """A batch of another size runs another graph, and the first one never again."""
    watched = Watched(4)
    found = []
    for number, rows in enumerate([8, *[5] * 10, *[3] * 5], start=1):
        before = len(watched.found)
        watched.run(torch.randn(rows, 16)).sum().backward()
        found += [number] * (len(watched.found) - before)
    assert found == [4, 8, 12, 16]


class Wide(nn.Module):
    """The loss ignores the first graph's output, which is not waited for, and its gradient goes through both others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.tanh(self.a(x))
        torch._dynamo.graph_break()
        x = torch.tanh(self.b(x)) * 100
        torch._dynamo.graph_break()
        return torch.tanh(self.c(x) / 100)


def test_gradients_are_those_of_the_leaves_alone() -> None:
    """Not those of activations between graphs."""
    watched = Watched(1, model=Wide())
    watched.run(X).sum().backward()
    watched.run(X)
    found = sorted(float(g.norm()) for g in watched.found[0][1])
    wanted = sorted(float(p.grad.double().norm()) for p in watched.model.parameters() if p.grad is not None)
    assert found == wanted
