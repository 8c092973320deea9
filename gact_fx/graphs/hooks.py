"""Which saved-tensor hooks are active, and how ours are paused.

Private, tried with torch 2.11 and 2.13: ``torch._C._autograd._top_saved_tensors_default_hooks``, and what PyTorch's own
``disable_saved_tensors_hooks`` calls, ``_saved_tensors_hooks_get_disabled_error_message``,
``_saved_tensors_hooks_disable`` and ``_saved_tensors_hooks_enable`` (public would be functions of
``torch.autograd.graph`` that say which hooks are active, and whether they may be set, and one that allows them again).
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch


def top_hooks() -> Any:
    """The innermost saved-tensor hooks, None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def caller_has_hooks() -> bool:
    """Whether the innermost hooks are not a model's own (which have a ``pause``) but, say, those of checkpointing."""
    hooks = top_hooks()
    return bool(hooks) and not hasattr(hooks[0], "pause")


def hooks_are_forbidden() -> bool:
    """Whether hooks cannot be set, as within ``torch.func.grad``."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None


def refuses_hooks(error: BaseException) -> bool:
    """Whether ``error`` comes from what cannot run beneath hooks, like torch.func's transforms, or Dynamo tracing them.

    They call by name what disables hooks, and it raises where there are any.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and "_saved_tensors_hooks_disable" in frames[-1].f_code.co_names


def allow_hooks() -> None:
    """Allow hooks again, in all of the process.

    Where Dynamo traces ``torch.func`` beneath hooks, PyTorch raises (`refuses_hooks`), and forbids hooks from then on.
    """
    torch._C._autograd._saved_tensors_hooks_enable()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Within, no model's hooks are active (they have a ``pause``): compiled graphs store what they save themselves."""
    hooks = top_hooks()
    with contextlib.ExitStack() as stack:
        if hooks and not caller_has_hooks():
            stack.enter_context(hooks[0].pause())
        yield


def outside_hooks(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, with the hooks `paused` while it runs."""
    return paused()(run)
