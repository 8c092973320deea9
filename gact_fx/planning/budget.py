"""From sensitivities to a plan: menus, the budget in its three forms, and the warning when it is too tight."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from gact_fx.codec.code import WIDTHS
from gact_fx.config import GROUP_SIZES, Config
from gact_fx.errors import UsageError
from gact_fx.passes.graph_analysis import GraphAnalysis, fixed_nbytes, held_nbytes
from gact_fx.plan import GraphPlan, Plan, TensorPlan, signature, tensor_seed
from gact_fx.planning.allocate_bits import Choice, Menu, allocate_bits, fewest_bytes
from gact_fx.planning.list_choices import Item, list_choices
from gact_fx.records import Sensitivity

log = logging.getLogger("gact_fx")
DEFAULT_GROUP = 256
# Compression variance beyond this share of the minibatch gradient's own is worth a warning.
NOISE_LIMIT = 0.1
# Re-planning costs a compilation, and must bring the predicted variance down by this much.
WORTHWHILE = 0.95
# Bits an element that graphs give up where eager PyTorch's codes take more than the budget.
MOST_GIVEN_UP = 0.5
# Budgets with more bits, and bounds on the noise, are kept without codes that take time.
TIGHT_BITS = 4
# Rotating a group takes longer than rounding it: it is for budgets where noise counts for more than a step's time.
ROTATING_BITS = 3
# What takes more bytes than a uniform width's must add so many times less, as two more bits would.
WORTH_BYTES = 16


@dataclass(frozen=True)
class GraphTensors:
    """One graph's tensors, what was measured about them, by key, and how often the graph runs in a step.

    ``excess`` and ``correction`` are those of `GraphProfile`; the sensitivities have the excess in them.
    """

    fingerprint: str
    analysis: GraphAnalysis
    sensitivities: Mapping[str, Sensitivity]
    runs: int = 1
    excess: Mapping[str, float] = field(default_factory=dict)
    correction: float = 1.0


def choose_plan(
    graphs: Sequence[GraphTensors],
    config: Config,
    model: str,
    minibatch_variance: float | None,
    *,
    squared_norm: float | None = None,
    warns: bool = True,
    eager_excess: float = 0.0,
) -> Plan:
    """Widths, roundings and group sizes for all tensors of all graphs under one budget.

    ``warns``: of a budget that is too tight, and of noise. Where the variance of the minibatch gradient is not known,
    the ``squared_norm`` of one is a bound of it, in the mean; what curved tensors may add is a part of that norm.
    ``eager_excess`` bytes, which eager PyTorch's codes take beyond ``budget_bits``, the graphs do without.
    """
    tensors = [(graph, t, how) for graph in graphs for t, how in graph.analysis.quantized()]
    items = [Item(t, how, graph.sensitivities.get(t.key)) for graph, t, how in tensors]
    menus_at = partial(_menus, items, [graph.runs for graph, _, _ in tensors], config, squared_norm)
    menus = menus_at(config.budget_bits or 0)
    # What nothing but exact will do for is not compressed, and takes nothing from the others' bits.
    numel = sum(graph.runs * t.numel for (graph, t, _), menu in zip(tensors, menus, strict=True) if _has_codes(menu))
    chosen = _choose(menus, graphs, config, minibatch_variance, numel, warns, eager_excess)
    plans: dict[str, list[TensorPlan]] = {graph.fingerprint: [] for graph in graphs}
    for (graph, tensor, _), item, choice in zip(tensors, items, chosen, strict=True):
        value = None if item.sensitivity is None else item.sensitivity.value
        seed = tensor_seed(config.seed, graph.fingerprint, tensor.key)
        code = None if choice.code is None else replace(choice.code, seed=seed)
        excess = graph.excess.get(tensor.key, 1.0)
        reason = _why_exact(item) if code is None else ""
        entry = TensorPlan(tensor.key, code, value, choice.merged, choice.stored, excess, reason)
        plans[graph.fingerprint].append(entry)
    has_other_budget = config.budget_bytes is not None or config.max_gradient_noise is not None
    plan = Plan(
        budget_bits=None if has_other_budget else config.budget_bits,
        model=model,
        graphs=tuple(
            GraphPlan(graph.fingerprint, tuple(plans[graph.fingerprint]), signature(graph.analysis.saved), graph.runs)
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
    variance *= max(graph.correction for graph in graphs)
    most = squared_norm if minibatch_variance is None else minibatch_variance
    if most is not None and warns:
        budget_for = partial(_budget_for, menus, menus_at, numel) if config.adaptive else partial(_width_for, menus)
        _warn_of_noise(variance, most, _correction(graphs), budget_for, is_bound=minibatch_variance is None)
    return replace(plan, variance=variance)


def _menus(
    items: Sequence[Item], runs: Sequence[int], config: Config, squared_norm: float | None, bits: float
) -> list[Menu]:
    """The choices for every tensor, with the bytes and the variance of all ``runs`` of its graph.

    A budget of few ``bits`` an element has more of them: there a gain in noise is worth its time.
    """
    is_bound = config.max_gradient_noise is not None
    rotated = ["rotated"] if not is_bound and bits <= ROTATING_BITS else []
    roundings = [config.rounding] if config.rounding != "auto" else ["stochastic", "dither", *rotated]
    group_sizes = GROUP_SIZES if config.group_size is None else (config.group_size,)
    curved = sum(count for item, count in zip(items, runs, strict=True) if item.how.is_curved)
    menus = list_choices(
        items, roundings=roundings, group_sizes=group_sizes, per_channel=not is_bound and bits <= TIGHT_BITS,
        squared_norm=squared_norm / curved if squared_norm and curved and config.adaptive else None,
    )  # fmt: skip
    return [
        [replace(c, nbytes=count * c.nbytes, variance=count * c.variance) for c in menu]
        for menu, count in zip(menus, runs, strict=True)
    ]


def is_better(plan: Plan, before: Plan, graphs: Sequence[GraphTensors], config: Config) -> bool:
    """Whether ``plan`` has other bits than ``before``, and is worth compiling again on these sensitivities.

    Under ``max_gradient_noise`` that is the case where ``before`` adds more than it may, or holds more than it must.
    """
    if plan.choices() == before.choices():
        return False
    if any(before.graph(graph.fingerprint) is None for graph in plan.graphs):
        return True
    variance = before.variance_on({graph.fingerprint: graph.sensitivities for graph in graphs})
    if variance is None or plan.variance is None:
        return True
    variance *= max(graph.correction for graph in graphs)
    if config.max_gradient_noise is None or plan.minibatch_variance is None:
        return plan.variance < WORTHWHILE * variance
    if variance > config.max_gradient_noise * plan.minibatch_variance:
        return plan.variance < variance
    if before.choices().keys() != plan.choices().keys():
        # What was too small to be compressed may be large now.
        return True
    return _held_nbytes(plan, graphs) < WORTHWHILE * _held_nbytes(before, graphs)


def _held_nbytes(plan: Plan, graphs: Sequence[GraphTensors]) -> int:
    entries = {graph.fingerprint: graph.entries() for graph in plan.graphs}
    return sum(graph.runs * held_nbytes(graph.analysis, entries[graph.fingerprint]) for graph in graphs)


def _choose(
    menus: Sequence[Menu],
    graphs: Sequence[GraphTensors],
    config: Config,
    minibatch_variance: float | None,
    numel: int,
    warns: bool,
    eager_excess: float,
) -> list[Choice]:
    assert config.budget_bits is not None
    if not config.adaptive:
        return [_fixed(menu, int(config.budget_bits)) for menu in menus]
    if config.max_gradient_noise is not None:
        if minibatch_variance is None:
            raise UsageError(
                "gact_fx.compile: max_gradient_noise needs the variance of the minibatch gradient, and this model gave "
                "none; pass budget_bits instead"
            )
        return fewest_bytes(menus, config.max_gradient_noise * minibatch_variance / _correction(graphs))
    if config.budget_bytes is not None:
        assert isinstance(config.budget_bytes, int), "a share is of what the caller knows"
        fixed = sum(graph.runs * fixed_nbytes(graph.analysis) for graph in graphs)
        least = fixed + sum(min(choice.nbytes for choice in menu) for menu in menus)
        if least > config.budget_bytes and warns:
            log.warning(
                "budget_bytes=%d cannot be kept: with every tensor at its least width this model holds %d bytes for "
                "backward; use recompute='full', a smaller batch, or a larger budget", config.budget_bytes, least,
            )  # fmt: skip
        return allocate_bits(menus, config.budget_bytes - fixed)
    exact = sum(menu[0].nbytes for menu in menus if not _has_codes(menu))
    # A model that is mostly eager cannot meet its budget by what little its graphs save.
    given_up = min(eager_excess, MOST_GIVEN_UP / 8 * numel)
    return allocate_bits(menus, config.budget_bits / 8 * numel + exact - given_up)


def _correction(graphs: Sequence[GraphTensors]) -> float:
    """How many times what menus say codes were found to add together; 1 where that is less."""
    return max((1.0, *(graph.correction for graph in graphs)))


def _why_exact(item: Item) -> str:
    """Why no code would do, '' where one would."""
    if item.sensitivity is None and item.how.unknown:
        return f"{item.how.unknown} reads it, which gact_fx does not know, and it was not measured"
    if item.sensitivity is not None and item.sensitivity.reason:
        return item.sensitivity.reason
    if item.how.bends and (item.sensitivity is None or not item.sensitivity.squared_biases):
        return "backward bends in it, and what rounding does there could not be measured"
    return ""


def _has_codes(menu: Menu) -> bool:
    return any(choice.code is not None for choice in menu)


def _fixed(menu: Menu, bits: int) -> Choice:
    """The least width of at least ``bits`` in groups of the default size, beside exact decisions: neither merged codes
    nor bare ones count.

    Exact where there is no code.
    """
    # Few decisions that are taken again come out otherwise, but one that does may move the gradient by more than 3 %.
    decided = [choice for choice in menu if choice.stored != "bare" and not choice.merged]
    plain = [(c.code, c) for c in decided if c.code is not None and not c.code.by_place and not c.code.per_channel]
    coded = [(code, choice) for code, choice in plain if code.bits >= bits]
    if not coded:
        return menu[-1]
    ranks = [(code.bits, code.rounding != "stochastic", abs(code.group_size - DEFAULT_GROUP)) for code, _ in coded]
    offered = [choice for rank, (_, choice) in zip(ranks, coded, strict=True) if rank == min(ranks)]
    # Of several things to store one that takes more bytes must add far less.
    found, *others = sorted(offered, key=lambda choice: choice.nbytes)
    for other in others:
        if other.variance * WORTH_BYTES < found.variance:
            found = other
    return found


def _budget_for(menus: Sequence[Menu], menus_at: Callable[[float], list[Menu]], numel: int, variance: float) -> float:
    """The bits an element, of ``numel``, that add ``variance`` at most, by ``menus`` and that budget's own."""

    def bits(menus: Sequence[Menu]) -> float:
        chosen = fewest_bytes(menus, variance)
        nbytes = sum(choice.nbytes for choice, menu in zip(chosen, menus, strict=True) if _has_codes(menu))
        return math.ceil(800 * nbytes / max(numel, 1)) / 100

    found = bits(menus)
    # Wider budgets do without the codes that take time.
    return max(found, bits(menus_at(found)))


def _width_for(menus: Sequence[Menu], variance: float) -> float:
    """The same where all tensors have one width; infinite where none that there is does it."""
    found = (bits for bits in WIDTHS if math.fsum(_fixed(menu, bits).variance for menu in menus) <= variance)
    return next(found, math.inf)


def _warn_of_noise(
    variance: float,
    minibatch_variance: float,
    correction: float,
    budget_for: Callable[[float], float],
    *,
    is_bound: bool,
) -> None:
    """``budget_for`` gives the budget that adds so much variance, by what menus say, at most."""
    if minibatch_variance <= 0 or variance <= NOISE_LIMIT * minibatch_variance:
        return
    bits = budget_for(NOISE_LIMIT * minibatch_variance / correction)
    log.warning(
        "compression adds %s%.0f %% to the variance of the minibatch gradient, more than %.0f %%; %s",
        "at least " if is_bound else "",
        100 * variance / minibatch_variance,
        100 * NOISE_LIMIT,
        f"budget_bits={bits:g} would bring it back" if bits <= 16 else "no budget_bits would bring it back",
    )
