"""Exceptions while a model is profiled: it trains on, uncompressed or with the plan it has, and the log says which."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import gradients, relative_error
from torch import nn

import gact_fx
from gact_fx.profiling.tape import Step
from gact_fx.training.check_plan import MeasuredStep
from gact_fx.training.model import session_of
from gact_fx.training.session import Session

X = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
OPTIONS: dict[str, Any] = {"inner": "eager", "min_elements": 64, "budget_bits": 8}


class Failure(Exception):
    """What the tests raise."""


class Fuse:
    """Raises when it is armed, once; in forward, in backward, or while sensitivities are measured."""

    def __init__(self) -> None:
        self.armed: tuple[str, type[BaseException]] | None = None

    def blow(self, place: str) -> None:
        if self.armed is not None and self.armed[0] == place:
            error, self.armed = self.armed[1], None
            raise error(f"in {place}")


fuse = Fuse()


@torch.library.custom_op("gact_fx_test::fuse", mutates_args=())
def fused(x: torch.Tensor) -> torch.Tensor:
    fuse.blow("forward")
    return x.clone()


@torch.library.custom_op("gact_fx_test::fuse_backward", mutates_args=())
def fused_backward(x: torch.Tensor) -> torch.Tensor:
    fuse.blow("backward")
    return x.clone()


fused.register_fake(torch.empty_like)
fused_backward.register_fake(torch.empty_like)
fused.register_autograd(lambda ctx, gradient: fused_backward(gradient))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.b(fused(torch.tanh(self.a(x)))).square().mean()
        return loss


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Net:
    """A network that fails where the fuse is set."""
    measure = Session.measure

    def measured(self: Session, *args: Any) -> MeasuredStep | None:
        found = measure(self, *args)
        fuse.blow("measuring")
        return found

    monkeypatch.setattr(Session, "measure", measured)
    fuse.armed = None
    return Net()


def step(model: nn.Module) -> float:
    """One step; the error of its gradient."""
    model.zero_grad()
    exact = torch.autograd.grad(Net.forward(model, X), list(model.parameters()))  # type: ignore[arg-type]
    model(X).backward()
    return relative_error(gradients(model), exact)


def failing(model: nn.Module, place: str, error: type[BaseException]) -> None:
    """A step that fails there, and what the user's loop may do after it."""
    fuse.armed = (place, error)
    with pytest.raises(error, match=f"in {place}"):
        # Not by step(), whose exact gradient would fail first.
        model(X).backward()
    assert fuse.armed is None
    model.zero_grad()


ERRORS = pytest.mark.parametrize("error", [Failure, KeyboardInterrupt])


@ERRORS
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_the_first_training_step(
    net: Net, place: str, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    model = gact_fx.compile(net, **OPTIONS)
    with caplog.at_level(logging.WARNING, "gact_fx"):
        failing(model, place, error)
    assert f"{error.__name__} in a step that was to be profiled; the next step takes its place" in caplog.text
    assert gact_fx.inspect(model).plan is None
    assert step(model) < 0.02
    assert gact_fx.inspect(model).plan is not None
    assert 1e-6 < step(model) < 0.02 and gact_fx.inspect(model).ratio > 2


@ERRORS
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_step_that_is_profiled_again(
    net: Net, place: str, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    model = gact_fx.compile(net, sample_batches=[X], profile_every=2, **OPTIONS)
    plan = gact_fx.inspect(model).plan
    assert step(model) < 0.02
    with caplog.at_level(logging.WARNING, "gact_fx"):
        failing(model, place, error)
    assert "the next step takes its place" in caplog.text and gact_fx.inspect(model).plan is plan
    measured: list[int] = []
    session = session_of(model)
    assert session is not None

    def measure(steps: Sequence[Step], bar: object = None) -> None:
        measured.append(len(steps))

    session.measure = measure  # type: ignore[method-assign]
    assert step(model) < 0.02 and measured == [1]
    assert step(model) < 0.02 and measured == [1]
    assert step(model) < 0.02 and measured == [1, 1]


@pytest.mark.parametrize("again", [False, True])
def test_measuring_fails_and_training_does_not(net: Net, again: bool, caplog: pytest.LogCaptureFixture) -> None:
    samples: dict[str, Any] = {"sample_batches": [X], "profile_every": 2} if again else {}
    model = gact_fx.compile(net, **samples, **OPTIONS)
    plan = gact_fx.inspect(model).plan
    if again:
        step(model)
    fuse.armed = ("measuring", Failure)
    with caplog.at_level(logging.WARNING, "gact_fx"):
        assert step(model) < 0.02
    goes_on = "training goes on with the plan it has" if again else "the next step is profiled instead"
    assert f"profiling a training step failed with Failure: in measuring; {goes_on}" in caplog.text
    assert gact_fx.inspect(model).plan is plan
    for _ in range(2):
        assert step(model) < 0.02
    report = gact_fx.inspect(model)
    assert report.ratio > 2 and report.plan is not None
    assert all(entry.sensitivity for graph in report.plan.graphs for entry in graph.tensors)


def test_measuring_that_always_fails_is_given_up(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    model = gact_fx.compile(net, **OPTIONS)
    with caplog.at_level(logging.WARNING, "gact_fx"):
        for _ in range(3):
            fuse.armed = ("measuring", Failure)
            assert 1e-6 < step(model) < 0.02
    assert "training goes on uncompressed" in caplog.text
    fuse.armed = ("measuring", Failure)
    assert step(model) < 1e-6
    report = gact_fx.inspect(model)
    assert fuse.armed is not None and report.plan is None
    assert "uncompressed, since no training step could be measured" in report.note


@pytest.mark.parametrize("again", [False, True])
def test_interrupted_while_measuring(net: Net, again: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Ctrl-C still ends the step, and whoever catches it trains on."""
    samples: dict[str, Any] = {"sample_batches": [X], "profile_every": 2} if again else {}
    model = gact_fx.compile(net, **samples, **OPTIONS)
    if again:
        step(model)
    with caplog.at_level(logging.WARNING, "gact_fx"):
        failing(model, "measuring", KeyboardInterrupt)
    assert "profiling a training step failed with KeyboardInterrupt" in caplog.text
    for _ in range(3):
        assert step(model) < 0.02
    assert gact_fx.inspect(model).ratio > 2


def in_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch)
    fuse.blow("loss")
    return loss


@pytest.mark.parametrize(("error", "planned"), [(Failure, False), (KeyboardInterrupt, True)])
@pytest.mark.parametrize("place", ["forward", "backward", "loss", "measuring"])
def test_sample_batches(
    net: Net, place: str, error: type[BaseException], planned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The exception reaches the user, and the model is as before compile(): uncompressed, or with the plan it had."""
    plan = gact_fx.inspect(gact_fx.compile(net, sample_batches=[X], **OPTIONS)).plan if planned else None
    fuse.armed = (place, error)
    with caplog.at_level(logging.WARNING, "gact_fx"), pytest.raises(BaseException, match=f"in {place}") as caught:
        gact_fx.compile(net, sample_batches=[X], loss_fn=in_loss, **OPTIONS)
    assert error in (caught.type, type(caught.value.__cause__))
    assert f"profiling failed with {caught.type.__name__}: the model is as it was before compile()" in caplog.text
    found = step(net)
    assert 1e-6 < found < 0.02 if planned else found < 1e-6
    assert not planned or gact_fx.inspect(net).plan is plan
    assert all(p.grad is None for p in net.parameters())


def test_the_compiler_is_not_taken_for_a_bad_batch(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise Failure("in compiling")

    monkeypatch.setattr("gact_fx.training.session.rewrite", fails)
    with pytest.raises(Exception, match="Failure: in compiling") as caught:
        gact_fx.compile(net, sample_batches=[X], loss_fn=in_loss, **OPTIONS)
    assert "batch must be" not in str(caught.value)


def test_an_exception_in_the_users_loss_between_steps(net: Net) -> None:
    """After the compiled forward pass, where nobody can see it."""
    model = gact_fx.compile(net, **OPTIONS)
    run: Callable[[], torch.Tensor] = lambda: in_loss(model, X)  # noqa: E731
    fuse.armed = ("loss", Failure)
    with pytest.raises(Failure):
        run()
    for _ in range(3):
        assert step(model) < 0.02
    assert gact_fx.inspect(model).ratio > 2
