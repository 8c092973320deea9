"""Adding a call to an FX graph together with its fake value."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def add_call(graph: fx.Graph, target: Any, args: tuple[Any, ...], name: str, **kwargs: Any) -> fx.Node:
    """A call of ``target`` where ``graph`` inserts, with ``meta["val"]``; one argument must be a tensor node."""
    node = graph.create_node("call_function", target, args, kwargs, name=name)
    fake_args = fx.map_arg(args, lambda n: n.meta["val"])
    fake_kwargs = fx.map_arg(kwargs, lambda n: n.meta["val"])
    values = [source.meta["val"] for source in node.all_input_nodes]
    tensors = [v for value in values for v in (value if isinstance(value, (tuple, list)) else (value,))]
    first: Any = next(value for value in tensors if isinstance(value, torch.Tensor))
    with first.fake_mode:
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node
