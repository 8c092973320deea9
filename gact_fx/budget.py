"""From sensitivities to a plan: menus, the budget in its three forms, and the warning when it is too tight."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gact_fx.accounting import fixed_nbytes
from gact_fx.codec_layout import ROUNDINGS
from gact_fx.config import GROUP_SIZES, Config
from gact_fx.passes.allocate_bits import Choice, Menu, allocate_bits, fewest_bytes
from gact_fx.passes.list_choices import Item, list_choices
from gact_fx.plan import GraphPlan, Plan, TensorPlan, saved_values, slot_seed
from gact_fx.records import Crossing, Eligibility, GraphAnalysis, SavedTensor, Sensitivity

log = logging.getLogger("gact_fx")
DEFAULT_GROUP = 256
# Compression variance beyond this share of the minibatch gradient's own is worth a warning.
NOISE_LIMIT = 0.1
# Re-planning costs a compilation, and must bring the predicted variance down by this much.
WORTHWHILE = 0.95


@dataclass(frozen=True)
class GraphTensors:
    """One graph's tensors, what was measured about them, by key, and how often the graph runs in a step.

    ``crossings``: by key, those that others hold as well.
    """

    fingerprint: str
    analysis: GraphAnalysis
    sensitivities: Mapping[str, Sensitivity]
    runs: int = 1
    crossings: Mapping[str, Crossing] = field(default_factory=dict)


# A graph, and one of its tensors that wants a width.
Slot = tuple[GraphTensors, SavedTensor, Eligibility]


@dataclass(frozen=True)
class _Share:
    """Slots that are to have one code, since they hold the same activations; mostly a single one.

    ``runs``: how often the graph of each runs in a step; ``crossing``: if there are several, or others hold them too.
    """

    slots: tuple[int, ...]
    runs: tuple[int, ...]
    crossing: Crossing | None = None

    @property
    def stored(self) -> int:
        """How many codes a step stores for them all."""
        return self.crossing.stored if self.crossing is not None else sum(self.runs)


def choose_plan(graphs: Sequence[GraphTensors], config: Config, model: str, minibatch_variance: float | None) -> Plan:
    """Widths, roundings and group sizes for all tensors of all graphs under one budget."""
    slots = [(graph, t, how) for graph in graphs for t, how in graph.analysis.quantized()]
    items = [Item(t, how, graph.sensitivities.get(t.key)) for graph, t, how in slots]
    listed = list_choices(items, roundings=_roundings(config), group_sizes=_group_sizes(config))
    shares = _shares(slots)
    menus = [_menu(share, [listed[i] for i in share.slots]) for share in shares]
    numel = sum(share.stored * slots[share.slots[0]][1].numel for share in shares)
    chosen = _choose(menus, graphs, config, minibatch_variance, numel)
    plans: dict[str, list[TensorPlan]] = {graph.fingerprint: [] for graph in graphs}
    by_slot = {i: (share, choice) for share, choice in zip(shares, chosen, strict=True) for i in share.slots}
    for i, ((graph, tensor, _), item) in enumerate(zip(slots, items, strict=True)):
        share, choice = by_slot[i]
        value = None if item.sensitivity is None else item.sensitivity.value
        first, first_tensor, _ = slots[share.slots[0]]
        seed = slot_seed(config.seed, first.fingerprint, first_tensor.key)
        code = (choice.bits, seed, value, choice.rounding, choice.group_size)
        plans[graph.fingerprint].append(TensorPlan(tensor.key, *code, share.crossing is not None, choice.merged))
    plan = Plan(
        budget_bits=None if _has_other_budget(config) else config.budget_bits,
        model=model,
        graphs=tuple(
            GraphPlan(
                graph.fingerprint, tuple(plans[graph.fingerprint]), saved_values(graph.analysis.saved), graph.runs
            )
            for graph in graphs
        ),
        recompute=config.recompute,
        minibatch_variance=minibatch_variance,
    )
    if not items or any(item.sensitivity is None for item in items):
        return plan
    # Menus overstate what moves the gradient little (`list_choices`); what is said of the plan is as measured.
    variance = plan.variance_on({graph.fingerprint: graph.sensitivities for graph in graphs})
    if variance is None or not math.isfinite(variance):
        variance = math.fsum(choice.variance for choice in chosen)
    if minibatch_variance is not None:
        _warn_of_noise(menus, variance, minibatch_variance, numel)
    return replace(plan, variance=variance)


def is_better(plan: Plan, before: Plan, graphs: Sequence[GraphTensors]) -> bool:
    """Whether ``plan`` has other bits than ``before``, and is worth compiling again on these sensitivities."""
    if plan.choices() == before.choices():
        return False
    variance = before.variance_on({graph.fingerprint: graph.sensitivities for graph in graphs})
    return variance is None or plan.variance is None or plan.variance < WORTHWHILE * variance


def _choose(
    menus: Sequence[Menu],
    graphs: Sequence[GraphTensors],
    config: Config,
    minibatch_variance: float | None,
    numel: int,
) -> list[Choice]:
    assert config.budget_bits is not None
    if not config.adaptive:
        return [_fixed(menu, int(config.budget_bits)) for menu in menus]
    if config.max_gradient_noise is not None:
        if minibatch_variance is None:
            raise ValueError(
                "gact_fx.compile: max_gradient_noise needs the variance of the minibatch gradient, and this model gave "
                "none; pass budget_bits instead"
            )
        return fewest_bytes(menus, config.max_gradient_noise * minibatch_variance)
    if config.budget_bytes is not None:
        fixed = sum(graph.runs * fixed_nbytes(graph.analysis) for graph in graphs)
        least = fixed + sum(min(choice.nbytes for choice in menu) for menu in menus)
        if least > config.budget_bytes:
            log.warning(
                "budget_bytes=%d cannot be kept: with every tensor at its least width this model holds %d bytes for "
                "backward; use recompute='full', a smaller batch, or a larger budget", config.budget_bytes, least,
            )  # fmt: skip
        return allocate_bits(menus, config.budget_bytes - fixed)
    return allocate_bits(menus, config.budget_bits / 8 * numel)


def _shares(slots: Sequence[Slot]) -> list[_Share]:
    """The slots with those that hold the same activations together."""
    members: dict[str, list[int]] = {}
    alone = []
    for i, (graph, tensor, _) in enumerate(slots):
        crossing = graph.crossings.get(tensor.key)
        if crossing is None:
            alone.append(_Share((i,), (graph.runs,)))
        else:
            members.setdefault(crossing.name, []).append(i)
    shares = []
    for indices in members.values():
        graph, tensor, _ = slots[indices[0]]
        runs = tuple(slots[i][0].runs for i in indices)
        shares.append(_Share(tuple(indices), runs, graph.crossings[tensor.key]))
    return sorted(alone + shares, key=lambda share: share.slots)


def _menu(share: _Share, menus: Sequence[Menu]) -> Menu:
    """What may be chosen for all slots of a share; of an activation's variance every run that holds it has a part."""
    options = [{(c.bits, c.rounding, c.group_size, c.merged): c for c in menu} for menu in menus]
    common = [code for code in options[0] if all(code in others for others in options)]
    if share.crossing is not None:
        # Beside what a graph keeps exact, eager PyTorch would store codes, too.
        least = share.crossing.min_bits
        common = [code for code in common if least == 1 or (code[0] is not None and code[0] >= least)] or common
    return [
        replace(
            options[0][code],
            nbytes=share.stored * options[0][code].nbytes,
            variance=math.fsum(runs * of[code].variance for runs, of in zip(share.runs, options, strict=True)),
        )
        for code in common
    ]


def _has_other_budget(config: Config) -> bool:
    return config.budget_bytes is not None or config.max_gradient_noise is not None


def _fixed(menu: Menu, bits: int) -> Choice:
    """The least width of at least ``bits`` in groups of the default size; exact codes and merged ones do not count."""
    coded = [choice for choice in menu if choice.bits is not None and choice.bits >= bits and not choice.merged]
    return min(coded, key=lambda c: (c.bits, c.rounding != "stochastic", abs(c.group_size - DEFAULT_GROUP)))


def _roundings(config: Config) -> tuple[str, ...]:
    return tuple(r for r in ROUNDINGS if r != "nearest") if config.rounding == "auto" else (config.rounding,)


def _group_sizes(config: Config) -> tuple[int, ...]:
    return GROUP_SIZES if config.group_size is None else (config.group_size,)


def _warn_of_noise(menus: Sequence[Menu], variance: float, minibatch_variance: float, numel: int) -> None:
    if minibatch_variance <= 0 or variance <= NOISE_LIMIT * minibatch_variance:
        return
    nbytes = sum(choice.nbytes for choice in fewest_bytes(menus, NOISE_LIMIT * minibatch_variance))
    bits = math.ceil(800 * nbytes / numel) / 100
    log.warning(
        "compression adds %.0f %% to the variance of the minibatch gradient, more than %.0f %%; %s",
        100 * variance / minibatch_variance,
        100 * NOISE_LIMIT,
        f"budget_bits={bits:.2f} would bring it back" if bits <= 16 else "no budget_bits would bring it back",
    )
