"""What backward is to read from blobs: what `insert_compression` hands to `read_masks` and `read_values`."""

from dataclasses import dataclass

import torch
from torch import fx

from gact_fx.codec.code import Code
from gact_fx.graphs.aot import SavedValue
from gact_fx.records import Standardization


@dataclass(frozen=True)
class MaskRead:
    """The backward nodes ``masks``, whose values lie in the blob of ``value``, in the ``order`` of its dimensions.

    ``before``: a node whose readers need them, too.
    """

    value: SavedValue
    masks: tuple[str, ...]
    order: tuple[int, ...]
    before: fx.Node | None = None


@dataclass(frozen=True)
class MergedRead:
    """The backward node ``mask``, which the codes of ``value`` tell."""

    value: SavedValue
    mask: fx.Node
    order: tuple[int, ...]
    code: Code


@dataclass(frozen=True)
class ValueRead:
    """The values of a tensor, in codes of the ``order`` of its dimensions.

    ``fill`` says what merged codes are decoded to where the mask stops them, "zero" or the "mean" of their channel.
    ``aliases`` are other saved values that the blob serves.
    """

    value: SavedValue
    order: tuple[int, ...]
    code: Code
    standardization: Standardization | None = None
    fill: str | None = None
    aliases: tuple[SavedValue, ...] = ()


@dataclass(frozen=True)
class CoefficientsRead:
    """The backward nodes whose values lie one behind the other, row by row, in the blob of ``value``; they are ``like``
    these.
    """

    value: SavedValue
    nodes: tuple[fx.Node, ...]
    like: tuple[torch.Tensor, ...]
    code: Code


Read = MaskRead | MergedRead | ValueRead | CoefficientsRead
