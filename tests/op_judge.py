"""Judges the gradient through PyTorch's own operators and modules, as its tests sample them: codes against autograd.

``python tests/op_judge.py --bits 4`` judges all of them, and says what share of the floating bytes is compressed.
"""

import argparse
import collections
import contextlib
import copy
import logging
import math
import warnings
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
    """What one sample's gradient was: "right", "wrong", "warned" (of the plan's noise), "not finite", "untraced" or
    "unstable" (float32 itself, and what cannot be repeated), with its error, and the error that the plan predicts, as
    shares of the gradient.

    ``nbytes`` of floating-point tensors are saved, of which ``compressed`` are not kept exact.
    """

    kind: str
    error: float = math.nan
    predicted: float = math.nan
    detail: str = ""
    nbytes: int = 0
    compressed: int = 0


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


def module_samples(info: Any) -> Iterator[tuple[nn.Module, list[Any], Any]]:
    """The modules that PyTorch's tests make of one class, each with its inputs' leaves and their structure."""
    for sample in info.module_inputs_func(
        info, device=torch.device("cpu"), dtype=torch.float32, requires_grad=False, training=True
    ):
        given, inputs = sample.constructor_input, sample.forward_input
        leaves, spec = tree_flatten((inputs.args, inputs.kwargs))
        if any(map(_is_varied, leaves)):
            yield info.module_cls(*given.args, **given.kwargs), leaves, spec


def judge(
    operator: Callable[..., Any], leaves: Sequence[Any], spec: Any, bits: int, seed: int | None = None
) -> Verdict:
    """``judge_module`` of the operator, or module, on the tensors in ``leaves``."""
    if isinstance(operator, nn.modules.lazy.LazyModuleMixin):
        # It needs its shapes first.
        operator(*_arguments(leaves, spec)[0], **_arguments(leaves, spec)[1])
    model = Through(operator, leaves, spec)
    varied = [x for x in leaves if _is_varied(x)]
    precise = copy.deepcopy(model).double()
    # A copy has a marker of its own.
    precise.constants = [_double(x) for x in model.constants]
    # Of few elements, few probes say little.
    options: dict[str, Any] = {"min_elements": LEAST, "group_size": 64, "profile_draws": 16}
    return judge_module(model, varied, bits, precise=precise, seed=seed, **options)


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
        with _warnings() as texts:
            _gradient(model, varied, seed)
            gradient = _gradient(model, varied, seed)
    except torch._dynamo.exc.TorchDynamoException as failed:
        return Verdict("error", detail=str(failed)[:300])
    report = gact_fx.inspect(model)
    plan = report.plan
    if plan is None:
        failure = next((text for text in texts if "failed with" in text or "NaN or infinity" in text), "")
        return Verdict("error", detail=failure[:300]) if failure else Verdict("untraced", detail="no plan")
    rows = [row for row in report.rows if "float" in row.dtype]
    total = sum(row.bytes_before for row in rows)
    compressed = sum(row.bytes_before for row in rows if row.bits is not None or row.encoding == "drop")
    error = float((gradient - exact).norm()) / norm
    predicted = math.sqrt(plan.variance or 0.0) / norm
    if not math.isfinite(error):
        return Verdict("not finite", error, predicted, "", total, compressed)
    limit = max(3 * predicted, FLOOR[bits])
    if error > limit:
        # One draw may be rare where single elements are far larger than the others: the mean over draws decides.
        found = gact_fx.measure_gradient_error(model, [tuple(varied)], lambda m, b: m(*b), draws=DRAWS)
        error = math.sqrt(found.total.variance + found.total.bias_estimate**2) / norm
    warning = next((text for text in texts if "compression adds" in text), "")
    kind = "right" if error <= limit else "warned" if warning else "wrong"
    return Verdict(kind, error, predicted, warning if kind == "warned" else "", total, compressed)


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """What gact_fx says meanwhile."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gact_fx")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def _gradient(model: nn.Module, inputs: Sequence[torch.Tensor], seed: int | None = None) -> torch.Tensor:
    model.zero_grad()
    if seed is not None:
        torch.manual_seed(seed)
    model(*inputs).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def _arguments(leaves: Sequence[Any], spec: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = tree_unflatten(list(leaves), spec)
    return tuple(args), kwargs


def _is_varied(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 0 and x.numel() >= LEAST


def _double(x: Any) -> Any:
    is_float = isinstance(x, torch.Tensor) and x.dtype is torch.float32
    return x.double() if is_float else torch.float64 if x is torch.float32 else x


def _weights(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1.5, x.numel(), dtype=x.dtype).reshape(x.shape)


def _all_cases() -> Iterator[tuple[str, Any, list[Any], Any]]:
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    for op in op_db:
        if op.supports_autograd and torch.float32 in op.dtypes:
            torch.manual_seed(0)
            yield from ((f"{op.name} {op.variant_test_name}".strip(), op.op, *each) for each in samples(op))
    for info in module_db:
        torch.manual_seed(0)
        yield from ((info.name, *each) for each in module_samples(info))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=int, choices=(4, 8), default=8)
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--part", default="0/1", help="which part of the cases, as 0/2 and 1/2 are the halves")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    logging.getLogger("gact_fx").propagate = False
    count: collections.Counter[str] = collections.Counter()
    nbytes = compressed = 0
    for index, (name, operator, leaves, spec) in enumerate(_all_cases()):
        if given.only not in name or index % parts != part:
            continue
        torch.manual_seed(0)
        try:
            verdict = judge(operator, leaves, spec, given.bits, 0 if isinstance(operator, nn.Module) else None)
        except Exception as error:
            verdict = Verdict("error", detail=f"{type(error).__name__}: {str(error)[:200]}")
        count[verdict.kind] += 1
        nbytes, compressed = nbytes + verdict.nbytes, compressed + verdict.compressed
        if verdict.kind != "right" or given.only:
            print(f"{name:40} {verdict}", flush=True)
    share = compressed / nbytes if nbytes else 0.0
    print(f"{dict(count)}; of {nbytes} floating bytes {compressed} are compressed, {share:.1%}")


if __name__ == "__main__":
    main()
