"""The error of an argument that cannot be used, and how errors are quoted in messages."""


class UsageError(ValueError):
    """Says what to give instead, and begins with the function called; not for wrapping as errors of the user's code."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or ''."""
    return (str(error).strip().splitlines() or [""])[0]
