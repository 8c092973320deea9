"""The error of an argument that cannot be used."""


class UsageError(ValueError):
    """Says what to give instead, and begins with the function called; not for wrapping as errors of the user's code."""
