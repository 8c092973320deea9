"""The result of ``gact_fx.measure_gradient_error``, and its table."""

import json
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass

# A bias of this share of the gradient's norm is float32's own rounding, in whatever order graphs add up.
_ROUNDOFF = 1e-5


@dataclass(frozen=True)
class ParameterError:
    """Error of one parameter's gradient, or of all. Norms are Euclidean; variances are sums over the elements.

    Attributes:
        norm: of the exact gradient, averaged over batches.
        bias: norm of the mean error, over all draws and batches. Noise alone makes it about ``standard_error``.
        standard_error: what noise alone makes of ``bias`` (root mean square): sqrt(variance / number of draws in all).
        bias_estimate: ``bias`` with the noise taken out: sqrt(max(bias^2 - standard_error^2, 0)), of which the square
            is (but for being cut off at 0) an unbiased estimate of the squared bias.
        significance: how many standard errors the squared bias is away from 0, estimated from all pairs of draws. In
            many elements noise makes a ``bias`` of hardly more or less than ``standard_error``, so that one of 1.2
            times as much may be certain. None for fewer than 4 draws in all, or without noise.
        variance: what compression adds to the variance of the gradient of a batch: unbiased estimate over draws,
            averaged over batches.
        minibatch_variance: variance of the exact gradient over batches, dropout included, unbiased; None with one
            batch. It is as rough as batches are few.
        is_biased: whether ``bias`` is more than 3 times ``standard_error`` (and float32's roundoff), or
            ``significance`` more than 3.
    """

    name: str
    numel: int
    norm: float
    bias: float
    standard_error: float
    bias_estimate: float
    significance: float | None
    variance: float
    minibatch_variance: float | None
    is_biased: bool

    @property
    def noise(self) -> float | None:
        """``variance / minibatch_variance``; None where that is not known or 0."""
        return self.variance / self.minibatch_variance if self.minibatch_variance else None

    @classmethod
    def from_moments(
        cls,
        name: str,
        numel: int,
        *,
        norm: float,
        bias: float,
        variance: float,
        minibatch_variance: float | None,
        count: int,
        significance: float | None,
    ) -> "ParameterError":
        """From the norms of the means and the variances of single gradients, of which there were ``count``."""
        error = math.sqrt(variance / count)
        estimate = math.sqrt(max(bias**2 - error**2, 0.0))
        is_biased = bias > _ROUNDOFF * norm and (bias > 3 * error or (significance or 0.0) > 3)
        return cls(name, numel, norm, bias, error, estimate, significance, variance, minibatch_variance, is_biased)


@dataclass(frozen=True)
class GradientError:
    """What compression does to the gradient: of every parameter that the loss depends on, and of all together.

    ``batches`` and ``draws`` (compressed gradients per batch) were measured; ``predicted_variance`` is the plan's, None
    where the plan was made without measuring. ``print(error)`` is a table.
    """

    parameters: tuple[ParameterError, ...]
    total: ParameterError
    batches: int
    draws: int
    predicted_variance: float | None

    def to_json(self) -> str:
        """Everything as JSON."""
        total, *rows = ({**asdict(p), "noise": p.noise} for p in (self.total, *self.parameters))
        counts = {"batches": self.batches, "draws": self.draws, "predicted_variance": self.predicted_variance}
        return json.dumps({**counts, "total": total, "parameters": rows}, indent=1)

    def __str__(self) -> str:
        lines = [_COLUMNS, *(_cells(row) for row in (*self.parameters, self.total))]
        return "\n".join((*table(lines, _COLUMNS[1:]), *_sentences(self)))


_COLUMNS = (
    "parameter", "elements", "norm", "bias", "std error", "bias - noise", "sigmas", "variance", "minibatch var",
    "noise",
)  # fmt: skip


def table(lines: Sequence[tuple[str, ...]], right: Container[str]) -> Iterator[str]:
    """The lines padded to columns; those with a heading in ``right`` have their cells on the right."""
    columns = []
    for column in zip(*lines, strict=True):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if column[0] in right else cell.ljust(width) for cell in column])
    return ("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def _cells(row: ParameterError) -> tuple[str, ...]:
    biases = (row.norm, row.bias, row.standard_error, row.bias_estimate)
    sigmas = "" if row.significance is None else f"{row.significance:.1f}"
    minibatch = "" if row.minibatch_variance is None else f"{row.minibatch_variance:.2e}"
    noise = "" if row.noise is None else _percent(row.noise)
    return (row.name, str(row.numel), *(f"{x:.2e}" for x in biases), sigmas, f"{row.variance:.2e}", minibatch, noise)


def _sentences(error: GradientError) -> Iterator[str]:
    total, n = error.total, error.batches
    yield (
        f"{n} {'batch' if n == 1 else 'batches'}, of each the exact gradient and {error.draws} compressed ones "
        "that differ in their rounding noise alone; norms and variances are summed over elements"
    )
    if total.noise is not None:
        yield (
            f"variance: compression adds {_percent(total.noise)} to the variance of the minibatch gradient "
            f"({total.variance:.2e} to {total.minibatch_variance:.2e}{_predicted(error)})"
        )
    else:
        why = "with one batch" if n == 1 else "where it does not vary"
        yield (
            f"variance: compression adds {total.variance:.2e}{_predicted(error)}; how much that is against the "
            f"minibatch gradient's own is not known {why}"
        )
    if total.norm:
        off = math.sqrt(total.variance + total.bias_estimate**2) / total.norm
        yield f"one compressed gradient is off by {_percent(off)} of the exact one's norm (r.m.s.)"
    share = f"; without the noise {_percent(total.bias_estimate / total.norm)} of the norm" if total.norm else ""
    sigmas = "" if total.significance is None else f", {total.significance:.1f} standard errors from 0"
    yield (
        f"bias: {'beyond' if total.is_biased else 'within'} 3 standard errors: the mean of all {n * error.draws} "
        f"errors is {total.bias:.2e}, where noise alone makes {total.standard_error:.2e}{share}{sigmas}"
    )
    beyond = [row.name for row in error.parameters if row.is_biased]
    more = f" and {len(beyond) - 5} more" if len(beyond) > 5 else ""
    yield f"parameters with a bias beyond 3 standard errors: {', '.join(beyond[:5]) + more or 'none'}"


def _predicted(error: GradientError) -> str:
    return "" if error.predicted_variance is None else f"; the plan predicted {error.predicted_variance:.2e}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if 1 <= share < 1000 else f"{100 * share:.2g} %"
