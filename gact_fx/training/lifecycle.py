"""The states of a compiled model, the transitions between them, and the one place where what it runs is exchanged."""

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from gact_fx.graphs.dynamo import in_backward, is_exporting


class State(Enum):
    """What a compiled model runs from its next call on."""

    # All tensors at the profiling width, until there is a plan.
    PROFILING = "profiling"
    PLANNED = "planned"
    # As at first, for a single step; the plan stays until that step gives a better one.
    PROFILING_AGAIN = "profiling again"
    # Uncompressed, since no step could be profiled.
    FAILED = "failed"
    # Uncompressed, as the configuration says.
    UNCOMPRESSED = "uncompressed"


_NEXT = {
    State.PROFILING: {State.PLANNED, State.FAILED},
    State.PLANNED: {State.PLANNED, State.PROFILING_AGAIN},
    # Two threads may ask for it at once.
    State.PROFILING_AGAIN: {State.PLANNED, State.PROFILING_AGAIN},
    # Another rank may have a plan, or fail as well.
    State.FAILED: {State.PLANNED, State.FAILED},
    State.UNCOMPRESSED: set(),
}


class Lifecycle:
    """The state of one compiled model; called, it runs what stands for that state.

    What runs is exchanged in a call from outside of backward: what checkpointing around the model runs again in
    backward has to save what it saved the first time.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._compile: Callable[[State], Callable[..., Any]] | None = None
        self._compiled: dict[State, Callable[..., Any]] = {}
        self._running: Callable[..., Any] | None = None
        self._before_calls: list[Callable[[], None]] = []
        self._original: Callable[..., Any] | None = None
        # What calling the model ran before it was compiled, None: its own code.
        self.replaces: Callable[..., Any] | None = None
        self._at_close: list[Callable[[], None]] = []
        self._is_closed = False
        # Whether any call came by; whoever calls the model's own forward passes this over.
        self.was_called = False

    @property
    def state(self) -> State:
        return self._state

    def run(self, compile: Callable[[State], Callable[..., Any]]) -> None:
        """Run in every state what ``compile(state)`` gives: anew with every plan, and else once."""
        self._compile = compile
        self._compiled = {self._state: compile(self._state)}

    def stands_for(self, original: Callable[..., Any]) -> None:
        """Have ``torch.export`` see ``original``, whatever the state, and run it when this is closed."""
        self._original = original

    def before_calls(self, call: Callable[[], None]) -> None:
        """Have ``call()`` run before every call from outside of backward, after others; it may change the state."""
        self._before_calls.append(call)

    def compile_again(self) -> None:
        """Compile what runs now from scratch."""
        if self._compile is not None:
            self._compiled[self._state] = self._compile(self._state)

    def at_close(self, call: Callable[[], None]) -> None:
        """Have ``call()`` run when this is closed."""
        self._at_close.append(call)

    def close(self) -> None:
        """Forget all that was compiled; whoever calls this still runs the original, and nothing changes the state."""
        if self._is_closed:
            return
        self._is_closed = True
        for call in self._at_close:
            call()
        self._compile, self._before_calls, self._at_close = None, [], []
        self._compiled = {} if self._original is None else {self._state: self._original}

    def planned(self) -> None:
        """There is a plan, or another one."""
        if self._is_closed:
            return
        again = self._compiled.get(State.PROFILING_AGAIN)
        self._compiled = {State.PROFILING_AGAIN: again} if again is not None else {}
        self._enter(State.PLANNED)

    def profile_again(self, is_due: bool) -> None:
        """The next step is to be profiled, or, where it is not ``is_due``, to run the plan."""
        state = State.PROFILING_AGAIN if is_due else State.PLANNED
        if state is not self._state and not self._is_closed:
            self._enter(state)

    def failed(self) -> None:
        """There will be no plan."""
        if self._is_closed:
            return
        self._compiled.pop(State.PROFILING, None)
        self._enter(State.FAILED)

    def _enter(self, state: State) -> None:
        assert state in _NEXT[self._state], f"{self._state.value} is not followed by {state.value}"
        self._state = state
        if self._compile is not None and state not in self._compiled:
            self._compiled[state] = self._compile(state)

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def current(self) -> Callable[..., Any]:
        """What to run now. Dynamo must not trace the choice."""
        if not in_backward():
            for call in self._before_calls:
                call()
            self._running = None
        if self._running is None:
            self._running = self._compiled[self._state]
        return self._running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_exporting() and self._original is not None:
            return self._original(*args, **kwargs)
        return self._call(*args, **kwargs)

    @torch.compiler.disable(reason="gact_fx.compile compiles this model itself")  # type: ignore[untyped-decorator, unused-ignore]
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self.was_called = True
        # A torch.compile around the model would else trace what is to run, and compile it without us.
        return self.current()(*args, **kwargs)
