"""Judges the gradient through one of PyTorch's own operators, as its tests sample it: codes against eager autograd."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import gact_fx

_VARIED = object()
# Inputs smaller than that say little about codes.
LEAST = 4
# Of one operator's samples the largest so many are judged.
SAMPLES = 1
DRAWS = 16
# Share of the gradient that a step may be off by, whatever was predicted; float32 itself is off by a part of that.
FLOOR = {8: 0.02, 4: 0.3}


class Through(nn.Module):
    """``operator`` on trainable functions of its floating-point inputs, which are read again, as is its result.

    A matrix product makes every input an activation that is worth storing; it begins as the identity, so that what
    the operator asks of its inputs still holds.
    """

    def __init__(self, operator: Callable[..., Any], inputs: Sequence[Any], spec: Any) -> None:
        super().__init__()
        self.operator, self.spec = operator, spec
        self.constants = [_VARIED if _is_varied(x) else x for x in inputs]
        self.weights = nn.ParameterList(torch.eye(x.shape[-1], dtype=x.dtype) for x in inputs if _is_varied(x))
        self.shifts = nn.ParameterList(torch.zeros(x.shape[-1], dtype=x.dtype) for x in inputs if _is_varied(x))

    def forward(self, *varied: torch.Tensor) -> torch.Tensor:
        hidden = [x @ w + b for x, w, b in zip(varied, self.weights, self.shifts, strict=True)]
        given = iter(hidden)
        args, kwargs = tree_unflatten([next(given) if x is _VARIED else x for x in self.constants], self.spec)
        results = [x for x in tree_leaves(self.operator(*args, **kwargs)) if isinstance(x, torch.Tensor)]
        loss = sum(((h * 0.7).sin() * _weights(h)).sum() for h in hidden)
        for result in results:
            if result.is_complex():
                result = torch.view_as_real(result)
            if result.is_floating_point() and result.requires_grad:
                loss = loss + (result.tanh() * _weights(result)).sum() + (result * _weights(result)).sum()
        return torch.as_tensor(loss)


@dataclass(frozen=True)
class Verdict:
    """What one sample's gradient was: "right", "wrong", "not finite", "untraced" or "unstable" (float32 itself, and
    what cannot be repeated), with its error, and the error that the plan predicts, as shares of the gradient."""

    kind: str
    error: float = math.nan
    predicted: float = math.nan
    detail: str = ""


def samples(op: Any) -> Iterator[tuple[list[Any], Any]]:
    """The leaves of the operator's sample inputs and their structure, largest first."""
    found: list[tuple[int, int, list[Any], Any]] = []
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=False):
        leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        size = sum(x.numel() for x in leaves if _is_varied(x))
        if size:
            found.append((size, len(found), leaves, spec))
    for _, _, leaves, spec in sorted(found, key=lambda each: each[:2], reverse=True)[:SAMPLES]:
        yield leaves, spec


def judge(operator: Callable[..., Any], leaves: Sequence[Any], spec: Any, bits: int) -> Verdict:
    """``judge_module`` of the operator on the tensors in ``leaves``."""
    model = Through(operator, leaves, spec)
    varied = [x for x in leaves if _is_varied(x)]
    precise = copy.deepcopy(model).double()
    # A copy has a marker of its own.
    precise.constants = [_double(x) for x in model.constants]
    # Of few elements, few probes say little.
    return judge_module(model, varied, bits, precise=precise, min_elements=LEAST, group_size=64, profile_draws=16)


def judge_module(
    model: nn.Module,
    varied: Sequence[torch.Tensor],
    bits: int,
    *,
    precise: nn.Module | None = None,
    inner: str = "eager",
    seed: int | None = None,
    **options: Any,
) -> Verdict:
    """Train two steps at ``bits``, of which the first is profiled, and compare the second one's gradient to eager's.

    ``precise`` is the model in float64, where a copy in float64 does not do. ``seed`` is set before every step.
    """
    precise = copy.deepcopy(model).double() if precise is None else precise
    try:
        exact, again = _gradient(model, varied, seed), _gradient(model, varied, seed)
        wide = _gradient(precise, [x.double() for x in varied], seed)
    except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError) as refused:
        return Verdict("untraced", detail=f"eager: {str(refused)[:80]}")
    norm = float(exact.norm())
    if not (math.isfinite(norm) and norm > 1e-12 and torch.equal(exact, again)):
        return Verdict("unstable", detail="no gradient, or not the same twice")
    if float((exact.double() - wide).norm()) > 1e-3 * norm:
        return Verdict("unstable", detail="float32 itself")
    torch._dynamo.reset()
    gact_fx.compile(model, budget_bits=bits, inner=inner, **options)
    try:
        _gradient(model, varied, seed)
        gradient = _gradient(model, varied, seed)
    except torch._dynamo.exc.TorchDynamoException as failed:
        return Verdict("error", detail=str(failed)[:300])
    plan = gact_fx.inspect(model).plan
    if plan is None:
        return Verdict("untraced", detail="no plan")
    error = float((gradient - exact).norm()) / norm
    predicted = math.sqrt(plan.variance or 0.0) / norm
    if not math.isfinite(error):
        return Verdict("not finite", error, predicted)
    limit = max(3 * predicted, FLOOR[bits])
    if error > limit:
        # One draw may be rare where single elements are far larger than the others: the mean over draws decides.
        found = gact_fx.measure_gradient_error(model, [tuple(varied)], lambda m, b: m(*b), draws=DRAWS)
        error = math.sqrt(found.total.variance + found.total.bias_estimate**2) / norm
    return Verdict("right" if error <= limit else "wrong", error, predicted)


def _gradient(model: nn.Module, inputs: Sequence[torch.Tensor], seed: int | None = None) -> torch.Tensor:
    model.zero_grad()
    if seed is not None:
        torch.manual_seed(seed)
    model(*inputs).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def _is_varied(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 0 and x.numel() >= LEAST


def _double(x: Any) -> Any:
    is_float = isinstance(x, torch.Tensor) and x.dtype is torch.float32
    return x.double() if is_float else torch.float64 if x is torch.float32 else x


def _weights(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1.5, x.numel(), dtype=x.dtype).reshape(x.shape)
