"""Which modules a call may change, and how to leave these as they were."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """The modules that calling ``function`` may change: itself, or what it refers to.

    That is what a function finds in its closure and globals, the attributes of a method's or a callable's object, and
    the arguments of a functools.partial; also in a list, tuple or dict there.
    """
    if isinstance(function, nn.Module):
        return [function]
    if isinstance(function, functools.partial):
        return modules_of(function.func) + _modules_in([*function.args, *function.keywords.values()])
    owner = getattr(function, "__self__", function)
    method = function if inspect.isroutine(function) else type(function).__call__
    plain = inspect.unwrap(getattr(method, "__func__", method))
    values = _variables_of(plain) if inspect.isfunction(plain) else []
    return _modules_in([owner, *getattr(owner, "__dict__", {}).values(), *values])


def _variables_of(function: Any) -> list[Any]:
    """What ``function`` finds in its closure and globals."""
    values = [function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__]
    for cell in function.__closure__ or ():
        # Within a class body the class, which ``super()`` reads, is not there yet: its cell is empty.
        with contextlib.suppress(ValueError):
            values.append(cell.cell_contents)
    return values


def _modules_in(values: list[Any]) -> list[nn.Module]:
    found = []
    for value in values:
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        found += [item for item in items if isinstance(item, nn.Module)]
    return found


@contextlib.contextmanager
def unchanged(modules: list[nn.Module]) -> Iterator[None]:
    """Restore the modules' buffers and their modes of training or evaluation, and the random number generators."""
    every = [module for root in modules for module in root.modules()]
    modes = [(module, module.training) for module in every]
    # A forward may change a buffer in place, or put another tensor in its place.
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in every
        for name, buffer in module.named_buffers(recurse=False)
    ]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                setattr(module, name, buffer)
