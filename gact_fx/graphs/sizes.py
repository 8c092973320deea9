"""Sizes under dynamic shapes: hints for planning, and size expressions rebuilt inside the backward graph.

Private, tried with torch 2.11 and 2.13: ``SymInt.node`` with ``expr`` and ``hint`` (public would be accessors of
``SymInt``), ``torch.utils._sympy.interp.sympy_interp`` with ``torch.utils._sympy.reference.PythonReferenceAnalysis``
(public would be a function that writes a size into a graph), and ``torch.fx.proxy.GraphAppendingTracer``, which is
public but for its documentation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx


def is_symbolic(value: object) -> bool:
    """Whether ``value`` is a size that is not known at compile time."""
    return isinstance(value, torch.SymInt)


def hint(value: int | torch.SymInt) -> int:
    """``value`` as it is on the traced batch (1 where even that is unknown)."""
    if isinstance(value, torch.SymInt):
        guess = value.node.hint
        return int(guess) if guess is not None else 1
    return int(value)


def is_same(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are written as the same expression, and so are equal whatever the batch."""
    left, right = (x.node.expr if isinstance(x, torch.SymInt) else sympy.Integer(x) for x in (a, b))
    return bool(sympy.expand(left - right) == 0)


def have_same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape whatever the batch."""
    return a.dim() == b.dim() and all(is_same(m, n) for m, n in zip(a.shape, b.shape, strict=True))


class SizeBuilder:
    """Builds FX values for symbolic sizes out of the integer placeholders of a graph.

    A SymInt must never become an FX argument: the graph would keep the traced batch's symbol. So a size like
    ``4*s0`` becomes ``mul(4, placeholder)``.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._known: dict[sympy.Expr, fx.Node] = {}
        self._graph = graph
        for node in graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and value.node.expr.is_symbol:
                self._known[value.node.expr] = node

    def can_build(self, sizes: Sequence[int | torch.SymInt]) -> bool:
        """Whether every symbol in ``sizes`` reaches this graph."""
        return all(
            symbol in self._known for s in sizes if isinstance(s, torch.SymInt) for symbol in s.node.expr.free_symbols
        )

    def build(self, sizes: Sequence[int | torch.SymInt]) -> list[Any]:
        """FX arguments (ints and nodes) for ``sizes``; new nodes go where the graph inserts."""
        return [self._build_one(size) if isinstance(size, torch.SymInt) else int(size) for size in sizes]

    def _build_one(self, size: torch.SymInt) -> Any:
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        expression = size.node.expr
        if expression.is_Integer:
            return int(expression)
        tracer = fx.proxy.GraphAppendingTracer(self._graph)
        symbols = {symbol: fx.Proxy(node, tracer) for symbol, node in self._known.items()}
        interpret: Callable[..., Any] = sympy_interp
        result = interpret(PythonReferenceAnalysis, symbols, expression)
        node = result.node if isinstance(result, fx.Proxy) else result
        if isinstance(node, fx.Node) and "val" not in node.meta:
            node.meta["val"] = size
        return node
