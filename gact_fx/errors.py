"""The errors that gact_fx raises: one base class, beside the built-in classes that callers may catch already."""

import difflib
from collections.abc import Iterable


class GactError(Exception):
    """Base class of the errors that gact_fx raises.

    Two kinds reach a caller otherwise: the compiled operators of ``gact_fx.ops`` raise plain ``ValueError``, and errors
    while Dynamo compiles come in its ``BackendCompilerFailed``.
    """


class UsageError(GactError, ValueError):
    """An argument that cannot be used: the message begins with the function called, and says what to give instead."""


class UsageTypeError(GactError, TypeError):
    """An argument of a type that cannot be used."""


class StepError(GactError, RuntimeError):
    """A training step that cannot be run as it was asked for."""


class MissingPackageError(GactError, ImportError):
    """A package that an optional part of gact_fx needs is not installed."""


def unknown_option(function: str, name: str, known: Iterable[str]) -> UsageError:
    """The error of an option that does not exist, with the nearest of the ``known`` ones, or else all of them."""
    options = sorted(known)
    near = difflib.get_close_matches(name, options, n=1)
    cure = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(options)}"
    return UsageError(f"{function}: unknown option {name!r}; {cure}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or ''."""
    return (str(error).strip().splitlines() or [""])[0]
