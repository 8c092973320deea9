"""What eager PyTorch between graphs does to a gradient of a few rows: it ran on the whole batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gact_fx.breaks.eager_vjp import EagerVJP, End
from gact_fx.graphs.sizes import RowSymbol


@dataclass(frozen=True)
class Rows:
    """The ``chosen`` ones of a batch's ``rows``, of a tensor that was traced as ``fake``."""

    symbol: RowSymbol
    fake: Any
    rows: int
    chosen: range

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Those of a tensor of the whole batch."""
        found: torch.Tensor = self.symbol.take(self.fake, x, self.rows, self.chosen)
        return found

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor of the whole batch with ``x`` in these rows, and zeros in all others."""
        return self.symbol.spread(self.fake, x, self.rows, self.chosen)


@dataclass(frozen=True)
class VJPOfRows:
    """The VJP of the ``whole`` batch, for a gradient of some rows, ``given``, and those of its ends that are ``found``.

    An end that is None has no rows.
    """

    whole: EagerVJP
    given: Rows
    found: Sequence[Rows | None]

    @property
    def ends(self) -> tuple[End, ...]:
        """Those of the whole batch."""
        return self.whole.ends

    def __call__(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of `ends`."""
        parts = self.whole(self.given.spread(gradient))
        return [part if rows is None else rows.take(part) for rows, part in zip(self.found, parts, strict=True)]

    def transpose(self, slopes: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The derivative with respect to the gradient, given those with respect to its ends' (None: zeros)."""
        pairs = zip(self.found, slopes, strict=True)
        spread = [x if rows is None or x is None else rows.spread(x) for rows, x in pairs]
        return self.given.take(self.whole.transpose(spread))
