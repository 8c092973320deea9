"""Which loops Inductor runs as one although none reads the other's result: those that read much in common.

By itself, Inductor joins two loops that have anything in common, such as the small table of a rotary embedding, which
every layer reads. What backward computes again for one layer is then computed in a loop of the layer above, and is in
memory from there on: the peak of Qwen3 (small, 4 bits) was 11.8 MB instead of 8.5.

Private, tried with torch 2.11 and 2.13: ``virtualized.V.choices`` and ``V.set_choices_handler``, by which Inductor has
its heuristics changed, ``InductorChoices.can_fuse_horizontal``, and ``BaseSchedulerNode.get_read_write_buffers_sizes``.
"""

import copy
from contextlib import AbstractContextManager
from typing import Any, cast

# Of what the smaller one of two loops reads and writes, the share that both must have in common.
SHARE = 1 / 8


def apart_unless_akin() -> AbstractContextManager[None]:
    """Compile in this context, with loops apart that have little in common."""
    from torch._inductor.virtualized import V

    usual: Any = V.choices

    def can_fuse_horizontal(scheduler: Any, one: Any, other: Any, shared: int) -> bool:
        least = min(one.get_read_write_buffers_sizes(), other.get_read_write_buffers_sizes())
        return shared >= SHARE * least and bool(usual.can_fuse_horizontal(scheduler, one, other, shared))

    choices = copy.copy(usual)
    choices.can_fuse_horizontal = can_fuse_horizontal
    return cast(AbstractContextManager[None], V.set_choices_handler(choices))
