"""Give the memory that profiling and compilers have freed back to the system."""

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim; None where another C library is."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def give_back() -> None:
    """Return the pages of the heap in which nothing lives to the system.

    glibc does so only at the end of its heap. What a step is profiled with lies below what is compiled next, so that a
    process grew by 100 MB and more with every plan.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
