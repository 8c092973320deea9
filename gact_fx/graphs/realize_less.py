"""Have Inductor compute an exponential again in each loop that reads it, rather than keep it in memory.

On a CPU Inductor keeps ("realizes") every result of an ``exp``, ``log``, ``sigmoid`` or ``tanh`` that two operators or
more read, to save time. (Before torch 2.13 of an ``exp`` or ``sigmoid``.) Backward of SiLU and of the norm in front of
it then has a tensor more in memory, the sigmoid, just where a step has its peak. Loops that are fused compute such a
result once.

Kept as usual is what reads half as many bytes again as it has, since that would be in memory for longer; what is made
of several kinds of these operators, such as Mish, which takes a sixth of a step to compute again; what is small; and
what is expanded, which would be computed for every element of the larger tensor.

Private, tried with torch 2.11 and 2.13: ``ir.StorageBox.should_realize_on_reuse``, which is replaced, with
``has_large_inner_fn``, ``num_reads`` and ``inner_fn_opcount``, ``config.realize_reads_threshold`` (an option of
Inductor's), and of ``virtualized.V.graph`` ``get_numel``, ``get_dtype`` and ``sizevars``.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from gact_fx.graphs.fused_loops import HEAVY, LEAST_NBYTES, MOST_HEAVY, MOST_READ
from gact_fx.graphs.mended_inductor import replaced_in

# ``expand`` asks, too, with the copies of an element as the number of users; operators have fewer of these.
MOST_USERS = 8


@contextlib.contextmanager
def realizing_less() -> Iterator[None]:
    """Compile in this context; what is replaced in Inductor is put back behind it."""
    from torch._inductor import config, ir

    box: Any = ir.StorageBox
    usual = box.should_realize_on_reuse

    def should_realize(self: Any, users: int, **options: Any) -> bool:
        """As usual, but for what has one heavy operator inside of it, and reads little."""
        if not usual(self, users, **options):
            return False
        if users > MOST_USERS or not options.get("graph_reuse", True):
            return True
        is_large = self.has_large_inner_fn() or self.num_reads() > config.realize_reads_threshold
        return bool(is_large) or not _is_light(self.data)

    with replaced_in(box, "should_realize_on_reuse", should_realize):
        yield


def _is_light(data: Any) -> bool:
    """Whether ``data``, a loop of Inductor's, has few kinds of heavy operators, is large, and reads little beside."""
    from torch._inductor.virtualized import V

    def nbytes(numel: Any, dtype: Any) -> int:
        return int(V.graph.sizevars.optimization_hint(numel)) * int(dtype.itemsize)

    count = data.inner_fn_opcount()
    kinds = {operator.__name__ for operator in HEAVY}.intersection(count.used_ops)
    read = sum(nbytes(V.graph.get_numel(name), V.graph.get_dtype(name)) for name in count.read_buffers)
    made = nbytes(data.get_numel(), data.get_dtype())
    return len(kinds) <= MOST_HEAVY and made >= LEAST_NBYTES and read <= MOST_READ * made
