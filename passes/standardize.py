"""Standardise values before they are coded, and undo it after: the arithmetic behind `find_standardizations`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gact_fx.records import Standardization

aten = torch.ops.aten
# (target, args, name) -> a new call
Add = Callable[[Any, tuple[Any, ...], str], fx.Node]


@dataclass(frozen=True)
class Operands:
    """The nodes of one graph that a `Standardization` names, None where it names none."""

    mean: fx.Node | None
    rstd: fx.Node | None
    sign: fx.Node | None


def resolve(by: Standardization, find: Callable[[str], fx.Node]) -> Operands:
    """The nodes that ``find`` has for the names in ``by``."""
    mean, rstd, sign = (find(name) if name else None for name in (by.mean, by.rstd, by.sign))
    return Operands(mean, rstd, sign)


def standardize(node: fx.Node, by: Operands, add: Add) -> fx.Node:
    """``(node - mean) * rstd``, turned over where the mask is false."""
    name = node.name
    if by.mean is not None:
        node = add(aten.sub.Tensor, (node, _wide(by.mean, node, add)), f"{name}_centred")
    if by.rstd is not None:
        node = add(aten.mul.Tensor, (node, _wide(by.rstd, node, add)), f"{name}_standard")
    return _turn(node, by, add)


def unstandardize(node: fx.Node, by: Operands, add: Add) -> fx.Node:
    """What `standardize` was given."""
    name = node.name
    node = _turn(node, by, add)
    if by.rstd is not None:
        node = add(aten.div.Tensor, (node, _wide(by.rstd, node, add)), f"{name}_scaled")
    if by.mean is not None:
        node = add(aten.add.Tensor, (node, _wide(by.mean, node, add)), f"{name}_shifted")
    return node


def _turn(node: fx.Node, by: Operands, add: Add) -> fx.Node:
    if by.sign is None:
        return node
    negative = add(aten.neg.default, (node,), f"{node.name}_negative")
    return add(aten.where.self, (by.sign, node, negative), f"{node.name}_turned")


def _wide(statistic: fx.Node, node: fx.Node, add: Add) -> fx.Node:
    """A number for every channel, beside ``node``."""
    shape = [1, statistic.meta["val"].numel(), *[1] * (node.meta["val"].dim() - 2)]
    return add(aten.reshape.default, (statistic, shape), f"{node.name}_{statistic.name}")
