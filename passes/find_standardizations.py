"""Find the batch norm behind a saved tensor, and the mask that tells the signs of what it normalises.

A group's step is a share of its range, and what a convolution returns has another range in every channel: the groups,
which run across channels, take the widest. Batch norm saves each channel's mean and 1 / deviation anyway; with these
the codes are made of standardised values. And where a ReLU follows, its mask is stored, exactly: it says on which side
of its threshold a value lies, near zero after standardising. With the values of one side turned over, ``-x`` for ``x``,
half of the range is left. Both take the variance of rounding a convolution's result down by about seven at equal bytes,
and the results stay unbiased: what is rounded is still linear in them.
"""

from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from gact_fx.graphs.aot import GraphPair
from gact_fx.graphs.edit import ancestors
from gact_fx.graphs.operator_table import BATCH_NORMS, RESHAPES
from gact_fx.graphs.operators import packet_of
from gact_fx.graphs.sizes import have_same_shape, hint
from gact_fx.records import Standardization

aten = torch.ops.aten
# Of 16-bit values the standardised ones would be rounded once more, always the same way.
_DTYPES = (torch.float32, torch.float64)


def find_standardizations(
    pair: GraphPair, masks: Mapping[str, Sequence[str]], exact: frozenset[str]
) -> dict[str, Standardization]:
    """Saved tensor → how its values are standardised, where they can be.

    ``masks`` maps the tensors to the masks that travel with them; ``exact`` are the saved tensors that are kept, and
    that backward reads.
    """
    values = {value.name: value for value in pair.saved_values()}
    names = {value.source: name for name, value in values.items() if name in exact}
    backward = {node.name: node for node in pair.backward.graph.nodes}
    found = {}
    for name, own in masks.items():
        source = values[name].source
        value = source.meta["val"]
        # A varying number of channels is not worth a guard.
        if value.dtype not in _DTYPES or value.dim() < 2 or not isinstance(value.shape[1], int):
            continue
        means, rstds = _statistics(source)
        mean = next((names[node] for node in means if node in names), "")
        rstd = next((names[node] for node in rstds if node in names), "")
        if mean and rstd:
            found[name] = Standardization(mean, rstd, _sign(values[name].placeholder, own, backward))
    return found


def _statistics(x: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Nodes of forward with the mean of every channel of ``x``, and with 1 / deviation."""
    means: list[fx.Node] = []
    rstds: list[fx.Node] = []
    for user in x.users:
        if (
            user.target is aten.var_mean.correction
            and user.args[0] is x
            and _is_over_channels(user, x.meta["val"].dim())
        ):
            means += _views(_parts(user, 1))
            shifted = _users(_parts(user, 0), aten.add.Tensor, aten.add.Scalar)
            rstds += _views(_users(shifted, aten.rsqrt.default))
        elif packet_of(user) in BATCH_NORMS and user.args[0] is x:
            mean, rstd = BATCH_NORMS[packet_of(user)]
            means += _views(_parts(user, mean))
            rstds += _views(_parts(user, rstd))
    channels = x.meta["val"].shape[1]
    return [n for n in means if _is_per_channel(n, channels)], [n for n in rstds if _is_per_channel(n, channels)]


def _is_over_channels(statistics: fx.Node, dim: int) -> bool:
    """Whether ``var_mean`` leaves the channels: of sizes that happen to be equal, those of rows look like theirs."""
    dims: Any = statistics.args[1] if len(statistics.args) > 1 else None
    return dims is not None and {d % dim for d in dims} == {*range(dim)} - {1}


def _is_per_channel(node: fx.Node, channels: int) -> bool:
    shape = [hint(size) for size in node.meta["val"].shape]
    return shape in ([channels], [1, channels, *[1] * (len(shape) - 2)])


def _parts(node: fx.Node, index: int) -> list[fx.Node]:
    return [user for user in node.users if user.target is getitem and user.args[1] == index]


def _users(nodes: list[fx.Node], *targets: object) -> list[fx.Node]:
    return [user for node in nodes for user in node.users if user.target in targets]


def _views(nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes, and the views of them."""
    found = list(nodes)
    for node in found:
        found += [user for user in node.users if packet_of(user) in RESHAPES]
    return found


def _sign(read: fx.Node, masks: Sequence[str], backward: Mapping[str, fx.Node]) -> str:
    """Of the masks as large as ``read`` the one that follows most directly from it, '' where there is none."""
    fits = [mask for mask in masks if have_same_shape(backward[mask].meta["val"], read.meta["val"])]
    return min(fits, key=lambda mask: len(ancestors([backward[mask]])), default="")
