"""Running mean and variance of exact and compressed gradients, without keeping them."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from gact_fx.diagnostics.gradient_error import ParameterError
from gact_fx.training.minibatch_variance import Moments


class GradientMoments:
    """What is known of one parameter's gradient. Errors are compressed minus exact gradients."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.was_reached = False
        # Of every draw: its error's product with the sum of the errors before it.
        self.products: list[float] = []
        self._name = name
        self._gradient = Moments(parameter.detach().double())
        self._sum = torch.zeros_like(self._gradient.mean)
        self._exact: torch.Tensor | None = None
        self._of_batch: Moments | None = None
        self._variances: list[float] = []

    def add(self, gradient: torch.Tensor | None, is_exact: bool) -> None:
        """The exact gradient of a batch, or (after it) a compressed one; None where the loss does not depend on it."""
        self.was_reached |= gradient is not None
        if is_exact:
            self._exact, self._of_batch = gradient, Moments(self._sum)
            self._gradient.add(0.0 if gradient is None else gradient.double())
            return
        assert self._of_batch is not None
        # The error varies as the gradient does, and its small numbers keep their digits.
        error = torch.zeros_like(self._sum)
        if gradient is not None and self._exact is not None:
            error = gradient.double() - self._exact.double()
        self._of_batch.add(error)
        self.products.append(float((error * self._sum).sum()))
        self._sum += error

    def finish_batch(self) -> None:
        assert self._of_batch is not None and self._of_batch.variance is not None
        self._variances.append(self._of_batch.variance)
        self._exact = self._of_batch = None

    def result(self) -> ParameterError:
        count = len(self.products)
        return ParameterError.from_moments(
            self._name,
            self._sum.numel(),
            norm=float(self._gradient.mean.norm()),
            bias=float(self._sum.norm()) / count,
            variance=math.fsum(self._variances) / len(self._variances),
            minibatch_variance=self._gradient.variance,
            count=count,
            significance=significance(self.products),
        )


def total(parts: Sequence[GradientMoments]) -> ParameterError:
    """All parameters' gradients as one vector."""
    rows = [part.result() for part in parts]
    products = [math.fsum(values) for values in zip(*(part.products for part in parts), strict=True)]
    minibatch = [row.minibatch_variance for row in rows if row.minibatch_variance is not None]
    return ParameterError.from_moments(
        "total",
        sum(row.numel for row in rows),
        norm=math.hypot(*(row.norm for row in rows)),
        bias=math.hypot(*(row.bias for row in rows)),
        variance=math.fsum(row.variance for row in rows),
        minibatch_variance=math.fsum(minibatch) if minibatch else None,
        count=len(products),
        significance=significance(products),
    )


def significance(products: Sequence[float]) -> float | None:
    """How many standard errors the squared bias, as estimated from all pairs of draws, is away from 0.

    ``products[d]`` is the product of error d with the sum of the d errors before it. Without bias each has mean 0 and
    a variance proportional to d, and with bias the mean d times its square: a regression through the origin. Its
    Student's t is given as the normal deviate of the same probability (Wallace, "Bounds on normal approximations to
    Student's and the chi-square distributions", 1959). None for fewer than 4 draws, or where there is no noise.
    """
    pairs, freedom = sum(range(len(products))), len(products) - 2
    if freedom < 2:
        return None
    square = math.fsum(products) / pairs
    scaled = [(product - square * d) / math.sqrt(d) for d, product in enumerate(products) if d]
    error = math.sqrt(math.fsum(x * x for x in scaled) / freedom / pairs)
    if not error > 1e-12 * abs(square):
        return None
    t = square / error
    deviate = (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(t * t / freedom))
    return math.copysign(deviate, t)
