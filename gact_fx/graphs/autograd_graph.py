"""What autograd's nodes hold.

Private, tried with torch 2.11 and 2.13: ``Node._input_metadata`` (shape and dtype of the gradients that a node takes;
public would be ``Node.metadata`` with them in it), and the attributes ``_saved_*`` and ``_raw_saved_*`` (a note of
PyTorch's documentation shows them; public would be a method of ``Node`` that lists what it saves).
"""

import functools
from collections.abc import Hashable, Iterator
from typing import Any

_PREFIX = "_raw_saved_"


def gradients_taken(node: Any) -> Any:
    """Of every gradient that ``node`` takes, what has its ``shape`` and ``dtype``."""
    return node._input_metadata


def saved_number(node: Any, name: str) -> Any:
    """The number that ``node`` has saved by that name."""
    return getattr(node, f"_saved_{name}")


def saved_by(node: Any) -> Iterator[tuple[str, Any]]:
    """What ``node`` saves, as hooks left it, with the name of the attribute that reads it."""
    kind: Any = type(node)
    for name in _attributes(kind):
        try:
            saved = getattr(node, name)
        except RuntimeError:
            # Freed: the model ran backward through a Python function of its own inside forward.
            return
        for item in saved if isinstance(saved, tuple) else (saved,):
            yield name.removeprefix(_PREFIX), item.data


@functools.lru_cache(maxsize=1024)
def _attributes(kind: Hashable) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(_PREFIX))
