"""A Python function as a graph of operators.

Private, tried with torch 2.11 and 2.13: ``torch.fx.experimental.proxy_tensor.make_fx`` (public would be a ``torch.fx``
function that traces what a tensor function calls; ``torch.export`` takes modules alone).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx


def trace(
    function: Callable[..., Any], values: Sequence[Any], decompositions: Mapping[Any, Callable[..., Any]]
) -> fx.GraphModule:
    """What ``function`` calls on ``values``, fake ones too, with ``decompositions`` in the place of operators."""
    traced: fx.GraphModule = make_fx(function, decomposition_table=dict(decompositions))(*values)
    return traced
