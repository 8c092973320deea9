"""Has large graphs traced with their rows as a size that varies, so that they can be profiled on a few rows."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from gact_fx.graphs.dynamo import cause_within_backend, first_sizes_vary, has_run_code, hides_errors, is_of_dynamo
from gact_fx.graphs.trees import tree_leaves
from gact_fx.profiling.few_rows import ENOUGH_NBYTES, FEWEST


class TraceAgain(Exception):
    """Raised by a backend before anything ran: the graph is large, and is to be traced with rows that vary."""


@dataclass(eq=False)
class RowTracing:
    """Whether what is compiled next may be traced anew with rows that vary, and whether that was asked for."""

    is_open: bool = False
    has_graphs: bool = False
    is_asked_for: bool = False
    is_refused: bool = False

    def ask_for(self, module: fx.GraphModule) -> None:
        """Called before ``module`` is compiled; of several graphs of a call with the first one.

        Raises:
            TraceAgain: the graph is to be traced anew.
        """
        is_large = self.is_open and _nbytes(module) >= 2 * FEWEST * ENOUGH_NBYTES
        # What the model did before would be done twice.
        if is_large and not (self.is_asked_for or hides_errors() or has_run_code(RowTracing._call.__code__)):
            self.is_asked_for = True
            raise TraceAgain
        self.has_graphs, self.is_open = True, False

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled``, a function that is compiled when it is called, traced anew where that is asked for."""
        return partial(self._call, compiled)

    def _call(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = _with_common_rows(tree_leaves((args, kwargs)))
        self.is_open = bool(batch) and torch.is_grad_enabled() and not self.has_graphs
        if not self.is_asked_for:
            try:
                return compiled(*args, **kwargs)
            except Exception as error:
                if not isinstance(cause_within_backend(error), TraceAgain):
                    raise
        try:
            with first_sizes_vary(batch if not self.is_refused else []):
                return compiled(*args, **kwargs)
        except Exception as error:
            if self.is_refused or self.has_graphs or not is_of_dynamo(error):
                raise
            # With sizes as they are, the model may well be traced.
            self.is_refused = True
        return compiled(*args, **kwargs)


def _with_common_rows(values: list[Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of a call that have as many rows as most have, none where these are few."""
    tensors = [x for x in values if isinstance(x, torch.Tensor) and not isinstance(x, torch.nn.Parameter) and x.dim()]
    rows = Counter(x.shape[0] for x in tensors)
    most = max(rows, key=lambda count: rows[count], default=0)
    return [x for x in tensors if x.shape[0] == most] if most >= 2 * FEWEST else []


def _nbytes(module: fx.GraphModule) -> int:
    """What the calls of a graph give, a bound on what may be saved of it."""
    values = (node.meta.get("example_value") for node in module.graph.nodes if node.op.startswith("call"))
    return sum(x.numel() * x.element_size() for x in values if isinstance(x, torch.Tensor))
