"""What the logits of a language model's head cost, where the head is computed some classes at a time."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from gact_fx.graphs.live_memory import storages
from gact_fx.graphs.sizes import hint

_OPERATOR = torch.ops.gact_fx.linear_cross_entropy.default


@dataclass(frozen=True)
class Logits:
    """Bytes of logits in one run of each graph: ``whole``, of those that are made since the model returns or reads them
    itself, and ``avoided``, of those that are never there whole.
    """

    whole: int = 0
    avoided: int = 0

    @classmethod
    def of(cls, forwards: Iterable[fx.GraphModule]) -> "Logits":
        """Of forward graphs, on the batch that they were traced with."""
        whole: dict[int, int] = {}
        avoided = 0
        for call in (node for module in forwards for node in _calls(module)):
            hidden, weight, known = call.args[0], call.args[1], call.args[5]
            if isinstance(known, fx.Node):
                # One tensor may be read by several losses.
                whole.update(storages(known))
            elif isinstance(hidden, fx.Node) and isinstance(weight, fx.Node):
                rows = hidden.meta["val"]
                avoided += hint(rows.shape[0]) * hint(weight.meta["val"].shape[0]) * rows.dtype.itemsize
        return cls(sum(whole.values()), avoided)


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    return module.graph.find_nodes(op="call_function", target=_OPERATOR)
