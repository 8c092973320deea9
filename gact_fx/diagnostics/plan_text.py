"""``python -m gact_fx report plan.json``: what a saved plan decides, for people."""

import math
from collections import Counter
from collections.abc import Iterator

from gact_fx.codec.by_place import picture
from gact_fx.codec.layout import BFLOAT16_BITS
from gact_fx.diagnostics.gradient_error import table
from gact_fx.diagnostics.noise import added_variance, noise_sentence, share_text
from gact_fx.plan import GraphPlan, Plan, TensorPlan

_COLUMNS = ("graph", "tensor", "dtype", "bits", "code", "of", "sensitivity", "noise", "reason")
_RIGHT = ("graph", "bits", "sensitivity", "noise")


def plan_text(plan: Plan) -> str:
    """Budget and noise, the graphs, and a line for each tensor that may be compressed.

    Shares of the noise follow from sensitivities and widths (GACT, equation 4).
    """
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    budget = f"{plan.budget_bits:g} bits per element" if plan.budget_bits is not None else "bytes, or noise"
    model = f", for the model {plan.model}" if plan.model else ""
    yield f"a plan of gact_fx{model}"
    yield f"budget: {budget}; recompute={plan.recompute!r}"
    noise = noise_sentence(plan)
    if noise:
        yield f"noise: {noise}"
    for index, graph in enumerate(plan.graphs):
        yield f"graph {index} ({graph.fingerprint}): {_about(graph)}"
    entries = [(i, graph, entry) for i, graph in enumerate(plan.graphs) for entry in graph.tensors]
    if not entries:
        yield "no tensor of this model may be compressed"
        return
    variances = [added_variance(entry) for _, _, entry in entries]
    weighed = [None if v is None else graph.runs * v for v, (_, graph, _) in zip(variances, entries, strict=True)]
    total = math.fsum(v for v in weighed if v is not None)
    shares = [v / total if v is not None and total > 0 else None for v in weighed]
    lines = [_cells(i, graph, entry, share) for (i, graph, entry), share in zip(entries, shares, strict=True)]
    yield ""
    yield from table([_COLUMNS, *lines], _RIGHT)


def _about(graph: GraphPlan) -> str:
    codes = [entry.code for entry in graph.tensors if entry.code is not None]
    exact = len(graph.tensors) - len(codes)
    widths = Counter(code.bits for code in codes if not code.by_place)
    parts = [f"{count} of {bits} bit{'s' if bits != 1 else ''}" for bits, count in sorted(widths.items())]
    by_place = sum(bool(code.by_place) for code in codes)
    several = ", ".join([*parts, f"{by_place} with widths by place"] if by_place else parts)
    runs = f"runs {graph.runs} times a step; " if graph.runs > 1 else ""
    return f"{runs}{len(graph.tensors)} tensors, {several or 'none with codes'}{f', {exact} exact' if exact else ''}"


def _cells(index: int, graph: GraphPlan, entry: TensorPlan, share: float | None) -> tuple[str, ...]:
    found = (value.split(" ") for value in graph.saved)
    dtype = next((value[1].removeprefix("torch.") for value in found if value[0] == entry.key and len(value) == 3), "")
    code = entry.code
    rounding = f"{code.rounding} {code.group_size}" if code is not None and code.bits != BFLOAT16_BITS else ""
    if code is not None:
        rounding += f" {picture(code.by_place)}" if code.by_place else " per channel" if code.per_channel else ""
    sensitivity = f"{entry.sensitivity:.2e}" if entry.sensitivity is not None else ""
    bits = f"{code.mean_bits:.3g}" if code is not None else "exact"
    of = entry.stored if code is not None else ""
    reason = entry.reason or (f"{entry.excess:.2g} times the predicted noise" if entry.excess > 1 else "")
    noise = share_text(share) if code is not None else ""
    return (str(index), entry.key, dtype, bits, rounding, of, sensitivity, noise, reason)
