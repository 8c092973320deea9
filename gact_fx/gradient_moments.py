"""Running mean and variance of exact and compressed gradients, without keeping them."""

from __future__ import annotations

import math

import torch
from torch import nn

from gact_fx.error_table import ParameterError


class Moments:
    """Mean and total variance of tensors that come one by one (Welford's method), in float64."""

    def __init__(self, like: torch.Tensor) -> None:
        self.count = 0
        self.mean = torch.zeros_like(like, dtype=torch.float64, memory_format=torch.contiguous_format)
        self._squares = 0.0

    def add(self, value: torch.Tensor | None) -> None:
        """None stands for zeros: the gradient of a parameter that the loss does not depend on."""
        self.count += 1
        ahead = (0 if value is None else value.double()) - self.mean
        self.mean += ahead / self.count
        self._squares += float(ahead.square().sum()) * (self.count - 1) / self.count

    @property
    def variance(self) -> float | None:
        """The unbiased estimate, summed over elements; None for fewer than two tensors."""
        return self._squares / (self.count - 1) if self.count > 1 else None


class GradientMoments:
    """What is known of one parameter's gradient."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.was_reached = False
        self._parameter = parameter.detach()
        self._gradient, self._errors = Moments(self._parameter), Moments(self._parameter)
        self._exact: torch.Tensor | None = None
        self._of_batch: Moments | None = None
        self._variances: list[float] = []

    def add(self, gradient: torch.Tensor | None, is_exact: bool) -> None:
        """The exact gradient of a batch, or (after it) a compressed one."""
        self.was_reached |= gradient is not None
        if is_exact:
            self._exact, self._of_batch = gradient, Moments(self._parameter)
            self._gradient.add(gradient)
            return
        assert self._of_batch is not None
        exact = 0.0 if self._exact is None else self._exact.double()
        # The error varies as the gradient does, and its small numbers keep their digits.
        self._of_batch.add(None if gradient is None else gradient.double() - exact)

    def finish_batch(self) -> None:
        assert self._of_batch is not None and self._of_batch.variance is not None
        self._errors.add(self._of_batch.mean)
        self._variances.append(self._of_batch.variance)
        self._exact = self._of_batch = None

    def result(self, name: str, draws: int) -> ParameterError:
        variance = math.fsum(self._variances) / len(self._variances)
        return ParameterError.from_moments(
            name,
            self._parameter.numel(),
            float(self._gradient.mean.norm()),
            float(self._errors.mean.norm()),
            variance,
            self._gradient.variance,
            count=draws * len(self._variances),
        )
