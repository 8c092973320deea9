"""Standardise values before they are coded, and undo it after: the arithmetic behind `find_standardizations`."""

from collections.abc import Callable

import torch
from torch import fx

from gact_fx.graphs.edit import Add
from gact_fx.records import Standardization

aten = torch.ops.aten
# Of one graph the mean, 1 / deviation and mask that a `Standardization` names, the last None where it names none.
Operands = tuple[fx.Node, fx.Node, fx.Node | None]


def resolve(by: Standardization, find: Callable[[str], fx.Node]) -> Operands:
    """The nodes that ``find`` has for the names in ``by``."""
    return find(by.mean), find(by.rstd), find(by.sign) if by.sign else None


def standardize(node: fx.Node, by: Operands, add: Add) -> fx.Node:
    """``(node - mean) * rstd``, turned over where the mask is false."""
    name, (mean, rstd, sign) = node.name, by
    node = add(aten.sub.Tensor, (node, _wide(mean, node, add)), f"{name}_centred")
    node = add(aten.mul.Tensor, (node, _wide(rstd, node, add)), f"{name}_standard")
    return _turn(node, sign, add)


def unstandardize(node: fx.Node, by: Operands, add: Add) -> fx.Node:
    """What `standardize` was given."""
    name, (mean, rstd, sign) = node.name, by
    node = _turn(node, sign, add)
    node = add(aten.div.Tensor, (node, _wide(rstd, node, add)), f"{name}_scaled")
    return add(aten.add.Tensor, (node, _wide(mean, node, add)), f"{name}_shifted")


def _turn(node: fx.Node, sign: fx.Node | None, add: Add) -> fx.Node:
    if sign is None:
        return node
    negative = add(aten.neg.default, (node,), f"{node.name}_negative")
    return add(aten.where.self, (sign, node, negative), f"{node.name}_turned")


def _wide(statistic: fx.Node, node: fx.Node, add: Add) -> fx.Node:
    """A number for every channel, beside ``node``."""
    shape = [1, statistic.meta["val"].numel(), *[1] * (node.meta["val"].dim() - 2)]
    return add(aten.reshape.default, (statistic, shape), f"{node.name}_{statistic.name}")
