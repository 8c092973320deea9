"""Faults of Inductor that are kept away while it compiles for us, so that models it cannot compile are trained.

Private, with torch before 2.13: ``CppScheduling._can_fuse_nodes_with_compatible_ranges``, which is replaced where there
is no ``_align_compatible_range_nodes``.

Private, tried with torch 2.11 and 2.13: ``ir.get_fill_order`` and, where it is, ``ir.Layout._stride_expr_ge_or_false``,
which are replaced, with what they read (``V.graph.sizevars``) and ``torch.utils._sympy.functions.Mod``.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def mended_inductor() -> Iterator[None]:
    """Compile in this context; what is replaced in Inductor is put back behind it."""
    with _sound_fusion(), _sound_strides():
        yield


@contextlib.contextmanager
def _sound_fusion() -> Iterator[None]:
    """Keep Inductor before torch 2.13 from fusing loops on the CPU of which it then finds that they differ.

    It splits the longer loop only once it has decided, and fails: ``AssertionError: ((2048, 16), (8, 16, 16, 16))``.
    """
    from torch._inductor.codegen.cpp import CppScheduling

    scheduling: Any = CppScheduling
    can_fuse = hasattr(scheduling, "_can_fuse_nodes_with_compatible_ranges")
    if not can_fuse or hasattr(scheduling, "_align_compatible_range_nodes"):
        yield
        return
    with replaced_in(scheduling, "_can_fuse_nodes_with_compatible_ranges", lambda *nodes: False):
        yield


@contextlib.contextmanager
def _sound_strides() -> Iterator[None]:
    """Let Inductor compare strides that are products of sums, such as a strided convolution leaves.

    Whether one divides the other torch 2.13 asks with Python's ``%``, which SymPy writes with reciprocals, and those
    have no range: ``ValueRangeError: Invalid ranges [0:-1]`` (pytorch/pytorch#188323). Those of saved views every torch
    sorts without guards: ``TypeError: cannot determine truth value of Relational``.
    """
    from torch._inductor import ir

    module: Any = ir
    with contextlib.ExitStack() as replaced:
        replaced.enter_context(replaced_in(module, "get_fill_order", _with_guards(module.get_fill_order)))
        if hasattr(module.Layout, "_stride_expr_ge_or_false"):
            own = staticmethod(_is_no_less)
            replaced.enter_context(replaced_in(module.Layout, "_stride_expr_ge_or_false", own))
        yield


def _is_no_less(left: Any, right: Any) -> bool:
    """Whether a stride is known to be another one or more; Inductor's own but for the kind of ``Mod``."""
    import sympy
    from torch._inductor.virtualized import V
    from torch.utils._sympy.functions import Mod

    left, right = sympy.sympify(left), sympy.sympify(right)
    is_known: Callable[[Any], bool] = V.graph.sizevars.guard_or_false
    if is_known(sympy.Eq(right, 0)):
        return True
    if is_known(sympy.Eq(left, 0)):
        return False
    return is_known(sympy.Ge(left, right)) or is_known(sympy.Eq(Mod(left, right), 0))


def _with_guards(get_fill_order: Callable[..., Any]) -> Callable[..., Any]:
    """``get_fill_order`` that compares symbolic strides by guards also where its caller gave it no environment."""
    from torch._inductor.virtualized import V

    def call(strides: Any, shape_env: Any = None) -> Any:
        return get_fill_order(strides, V.graph.sizevars.shape_env if shape_env is None else shape_env)

    return call


@contextlib.contextmanager
def replaced_in(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` in this context."""
    # As it stands in the class: a static method that is read the usual way is a function.
    before = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
