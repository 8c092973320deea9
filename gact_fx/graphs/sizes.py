"""Sizes under dynamic shapes: hints for planning, and size expressions rebuilt inside the backward graph.

Private, tried with torch 2.11 and 2.13: ``SymInt.node`` with ``expr`` and ``hint`` (public would be accessors of
``SymInt``), ``torch.utils._sympy.interp.sympy_interp`` with ``torch.utils._sympy.reference.PythonReferenceAnalysis``
(public would be a function that writes a size into a graph), and ``torch.fx.proxy.GraphAppendingTracer``, which is
public but for its documentation.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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


def batch_rows(nodes: Sequence[fx.Node]) -> int | torch.SymInt | None:
    """The rows of a batch: what most tensors among a graph's inputs ``nodes`` have as their first size, if it is known.

    A size that varies comes first, since what varies is the batch as a rule.
    """
    values = [node.meta.get("val") for node in nodes]
    firsts: list[Any] = [x.shape[0] for x in values if isinstance(x, torch.Tensor) and x.dim()]
    counts = Counter(first.node.expr if is_symbolic(first) else first for first in firsts)
    most = max(counts, key=lambda size: (not isinstance(size, int), counts[size]), default=None)
    return next((first for first in firsts if (first.node.expr if is_symbolic(first) else first) == most), None)


def elements_of_row(x: torch.Tensor, rows: int | torch.SymInt | None) -> int | None:
    """How many elements ``x`` has for every one of the ``rows`` of a batch; None where that varies or is not known."""
    if rows is None or (isinstance(rows, int) and rows == 0):
        return None
    numel, divisor = (n.node.expr if isinstance(n, torch.SymInt) else sympy.Integer(n) for n in (x.numel(), rows))
    quotient = sympy.expand(numel / divisor)
    return int(quotient) if quotient.is_Integer else None


class RowSymbol:
    """The symbol that stands for the rows of a batch, and how many of these the traced batch has.

    ``nodes`` are the inputs of a graph; the rows are what most of the tensors among them have as their first size.
    There is no symbol (`is_known` False) where no tensor has one there. Behind a graph break, tensors of as many
    ``rows`` may each have a symbol of their own, and all of these count; ``values`` are the real inputs.
    """

    def __init__(self, nodes: Sequence[fx.Node], values: Sequence[Any] = (), rows: int | None = None) -> None:
        fakes = [node.meta.get("val") for node in nodes]
        firsts: list[Any] = [x.shape[0] if isinstance(x, torch.Tensor) and x.dim() else None for x in fakes]
        symbols = [s.node.expr if isinstance(s, torch.SymInt) and s.node.expr.is_symbol else None for s in firsts]
        if rows is None:
            counts = Counter(symbol for symbol in symbols if symbol is not None)
            self._symbols = set(sorted(counts, key=lambda symbol: -counts[symbol])[:1])
        else:
            pairs = zip(symbols, values, strict=True)
            self._symbols = {symbol for symbol, x in pairs if symbol is not None and x.shape[0] == rows}

    @property
    def is_known(self) -> bool:
        """Whether there is such a symbol."""
        return bool(self._symbols)

    def is_in(self, value: object) -> bool:
        """Whether a fake tensor's sizes, or a size, depend on the rows."""
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        return any(self._symbols & s.node.expr.free_symbols for s in sizes if isinstance(s, torch.SymInt))

    def rows(self, fakes: Sequence[Any], values: Sequence[Any]) -> int | None:
        """How many rows the real ``values`` have, of which ``fakes`` were traced; None where nothing says it."""
        for fake, value in zip(fakes, values, strict=True):
            first: Any = fake.shape[0] if isinstance(fake, torch.Tensor) and fake.dim() else 0
            if isinstance(first, torch.SymInt) and first.node.expr in self._symbols:
                return int(value.shape[0])
        return None

    @staticmethod
    def apart(rows: int, few: int) -> range:
        """``few`` of the ``rows``, as far apart as they can be: loaders may sort rows, by length or by class."""
        return range(rows // few // 2, rows, rows // few)[:few]

    def take(self, fake: Any, value: Any, rows: int, chosen: range) -> Any:
        """What ``value``, which has ``rows``, is for the ``chosen`` ones: a size, or a copy of parts of a tensor.

        Raises:
            ValueError: a size depends on the rows, and is no multiple of them.
        """
        few = len(chosen)
        if not self.is_in(fake):
            return value
        if not isinstance(value, torch.Tensor):
            return _share(value, rows, few)
        found = value.detach()
        for dimension, size in enumerate(fake.shape):
            if self.is_in(size):
                taken = _share(value.shape[dimension], rows, few)
                every = found.unflatten(dimension, (rows, taken // few)).movedim(dimension, 0)
                apart = every[chosen.start : chosen.stop : chosen.step]
                found = apart.clone().movedim(0, dimension).flatten(dimension, dimension + 1)
        return found

    def is_apart_in(self, fake: torch.Tensor) -> bool:
        """Whether the rows are a dimension of their own of ``fake``: flattened ones may be in any order."""
        sizes: list[Any] = [size for size in fake.shape if self.is_in(size)]
        return len(sizes) == 1 and sizes[0].node.expr in self._symbols

    def repeat(self, fake: Any, value: Any, rows: int) -> Any:
        """What ``value``, which has ``rows``, is where each of these is there twice."""
        if not self.is_in(fake):
            return value
        if not isinstance(value, torch.Tensor):
            return _share(value, rows, 2 * rows)
        for dimension, size in enumerate(fake.shape):
            if self.is_in(size):
                value = torch.cat([value, value], dimension)
        return value


def known_symbols(fakes: Sequence[Any], values: Sequence[Any]) -> dict[Any, int]:
    """What the symbols in ``fakes``, a graph's inputs as they were traced, stand for where these have ``values``."""
    found: dict[Any, int] = {}
    for fake, value in zip(fakes, values, strict=True):
        is_tensor = isinstance(fake, torch.Tensor)
        pairs = zip(fake.shape, value.shape, strict=True) if is_tensor else [(fake, value)]
        found.update({size.node.expr: int(real) for size, real in pairs if is_symbolic(size)})
    return found


def with_symbols(fake: Any, known: Mapping[Any, int]) -> Any:
    """What was traced, where the symbols stand for what is ``known``: a size, or a tensor without data."""
    if isinstance(fake, torch.Tensor):
        shape, stride = ([with_symbols(size, known) for size in sizes] for sizes in (fake.shape, fake.stride()))
        varies = any(map(is_symbolic, (*fake.shape, *fake.stride())))
        return torch.empty_strided(shape, stride, dtype=fake.dtype, device="meta") if varies else fake
    return int(fake.node.expr.subs(known)) if is_symbolic(fake) else fake


def _share(size: int, rows: int, few: int) -> int:
    if size % rows:
        raise ValueError(f"a size of {size} is no multiple of the {rows} rows that it depends on")
    return size // rows * few


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
