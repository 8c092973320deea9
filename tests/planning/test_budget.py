"""Plans made from the three forms of the budget."""

import itertools
import logging
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Mixed, mixed_batch

import gact_fx
from gact_fx.codec.code import WIDTHS, Code, step_variance
from gact_fx.codec.layout import blob_nbytes
from gact_fx.config import Config
from gact_fx.passes.encodings import Keep, Mask, Pack, Quantize
from gact_fx.passes.find_bends import Coefficients
from gact_fx.passes.graph_analysis import GraphAnalysis
from gact_fx.plan import Plan
from gact_fx.planning.budget import MOST_GIVEN_UP, NOISE_LIMIT, GraphTensors, choose_plan, is_better
from gact_fx.planning.list_choices import Item, list_choices
from gact_fx.records import SavedTensor, Sensitivity

GROUP, NUMEL = 256, 8192
OPTIONS: dict[str, Any] = {"group_size": GROUP}


def test_graphs_do_without_what_eager_codes_take_too_much() -> None:
    tensors = graph(*VALUES)
    total, excess = len(VALUES) * NUMEL, NUMEL / 8
    full, less, least_of_all = (
        nbytes(choose_plan([tensors], Config(budget_bits=4, **OPTIONS), "m", None, eager_excess=e), tensors)
        for e in (0.0, excess, 100 * excess)
    )
    assert less <= full - excess
    # But they do not pay for a model that is mostly eager.
    assert least_of_all >= (4 - MOST_GIVEN_UP) * total / 8 - NUMEL / 8


def test_a_bound_on_noise_without_graphs() -> None:
    assert choose_plan([], Config(max_gradient_noise=0.1), "", 1.0).graphs == ()


def saved(name: str, owner: str = "nobody", dtype: torch.dtype = torch.float32, storage: int = 0) -> SavedTensor:
    return SavedTensor(name, f"{name}#0", name, "", (NUMEL,), (1,), dtype, storage, NUMEL * dtype.itemsize, owner)


def measured(value: float) -> Sensitivity:
    codes = {
        Code(b, r, GROUP): value * s * step_variance(b) for b in WIDTHS for r, s in (("stochastic", 1), ("dither", 2))
    }
    return Sensitivity(value, {**codes, Code(16, "stochastic", GROUP): value * 2.0**-18})


def turned(measured: Sensitivity, share: float) -> Sensitivity:
    """What was ``measured``, with rotated codes that add ``share`` of that."""
    others = {replace(code, rounding="rotated"): share * v for code, v in measured.variances.items() if code.bits <= 4}
    return replace(measured, variances={**measured.variances, **others})


def graph(*values: float, exact: bool = False) -> GraphTensors:
    """One graph with a quantized tensor of every sensitivity."""
    tensors = [saved(f"t{i}", storage=i) for i in range(len(values))]
    how = [Quantize(t.name, "", (0,), () if exact else ("mask",)) for t in tensors]
    found = {t.key: measured(value) for t, value in zip(tensors, values, strict=True)}
    return GraphTensors("graph", GraphAnalysis(tuple(tensors), tuple(how)), found)


def nbytes(plan: Plan, of: GraphTensors) -> int:
    """Bytes of the quantized tensors."""
    entries = plan.graphs[0].entries()
    stored = [(t, how.nbytes(t, entries[t.key])) for t, how in of.analysis.quantized()]
    return sum(t.nbytes if size is None else size for t, size in stored)


def least(of: GraphTensors) -> int:
    return sum(int(blob_nbytes(t.numel, t.dtype, 1, GROUP, h.mask_numel)) for t, h in of.analysis.quantized())  # type: ignore[arg-type, misc]


VALUES = (1.0, 10.0, 100.0, 1000.0)


@pytest.mark.parametrize("bits", [1.5, 2.0, 3.3, 4.0, 8.0])
def test_budget_bits_is_an_average_with_metadata(bits: float) -> None:
    tensors = graph(*VALUES)
    plan = choose_plan([tensors], Config(budget_bits=bits, **OPTIONS), "m", None)
    total = len(VALUES) * NUMEL
    # A step of one tensor is a bit of each of its elements.
    assert bits * total / 8 - NUMEL / 8 <= nbytes(plan, tensors) <= bits * total / 8
    widths = [entry.bits for entry in plan.graphs[0].tensors]
    assert widths == sorted(widths, key=lambda b: b or 32)  # the more sensitive, the wider
    assert plan.variance == pytest.approx(
        sum(v * step_variance(b) for v, b in zip(VALUES, widths, strict=True) if b in WIDTHS)
    )


def with_fixed(tensors: GraphTensors) -> tuple[GraphTensors, int]:
    """``tensors`` beside what a graph holds whatever the plan, and how much that is."""
    others = [
        (saved("kept", storage=100), Keep("kept", "")),
        (saved("view", storage=100), Keep("view", "")),
        (saved("returned", "output", storage=101), Keep("returned", "")),
        (saved("weight", "parameter", storage=102), Keep("weight", "")),
        (saved("batch", "caller", storage=103), Keep("batch", "")),
        (saved("mask", dtype=torch.bool, storage=104), Mask("mask", "", (0,))),
        (saved("offsets", dtype=torch.int8, storage=105), Pack("offsets", "", (0,), 2)),
    ]
    analysis = tensors.analysis
    both = GraphAnalysis((*analysis.saved, *(t for t, _ in others)), (*analysis.encodings, *(how for _, how in others)))
    return replace(tensors, analysis=both), NUMEL * 4 * 2 + NUMEL // 8 + NUMEL // 4


@pytest.mark.parametrize("share", [1.2, 2.0, 5.0])
def test_budget_bytes_counts_everything(share: float, caplog: pytest.LogCaptureFixture) -> None:
    tensors, fixed = with_fixed(graph(*VALUES))
    budget = fixed + int(least(tensors) * share)
    with caplog.at_level(logging.WARNING, "gact_fx"):
        plan = choose_plan([tensors], Config(budget_bytes=budget, **OPTIONS), "m", None)
    assert budget - NUMEL // 4 <= fixed + nbytes(plan, tensors) <= budget
    assert not caplog.records


def test_too_few_bytes_are_answered_with_the_least(caplog: pytest.LogCaptureFixture) -> None:
    tensors, fixed = with_fixed(graph(*VALUES))
    with caplog.at_level(logging.WARNING, "gact_fx"):
        plan = choose_plan([tensors], Config(budget_bytes=fixed, **OPTIONS), "m", None)
    assert {entry.bits for entry in plan.graphs[0].tensors} == {1}
    assert f"budget_bytes={fixed} cannot be kept" in caplog.text
    assert f"holds {fixed + least(tensors)} bytes" in caplog.text
    caplog.clear()
    choose_plan([tensors], Config(budget_bytes=fixed + least(tensors), **OPTIONS), "m", None)
    assert not caplog.records


@pytest.mark.parametrize("noise", [1e-5, 1e-3, 0.1, 1.0, 100.0])
def test_gradient_noise_is_bounded_by_the_fewest_bytes(noise: float) -> None:
    tensors, minibatch = graph(1.0, 30.0, exact=True), 5.0
    config = Config(max_gradient_noise=noise, **OPTIONS)
    plan = choose_plan([tensors], config, "m", minibatch)
    assert plan.variance is not None and plan.variance <= noise * minibatch * (1 + 1e-9)
    # The oracle: every pair of choices.
    items = [Item(t, how, tensors.sensitivities[t.key]) for t, how in tensors.analysis.quantized()]
    pairs = itertools.product(*list_choices(items, roundings=["stochastic", "dither"], group_sizes=[GROUP]))
    fits = [pair for pair in pairs if sum(choice.variance for choice in pair) <= noise * minibatch]
    best = min(sum(choice.nbytes for choice in pair) for pair in fits)
    assert best <= nbytes(plan, tensors) <= best + NUMEL // 8  # one tensor's step


def test_gradient_noise_needs_two_batches_or_one_that_can_be_halved() -> None:
    message = "max_gradient_noise needs the variance of the minibatch gradient"
    with pytest.raises(ValueError, match=message):
        choose_plan([graph(*VALUES)], Config(max_gradient_noise=0.1), "m", None)
    with pytest.raises(ValueError, match=message):
        gact_fx.compile(Mixed(), inner="eager", sample_batches=[mixed_batch(1)], max_gradient_noise=0.1)


def test_gradient_noise_of_a_model() -> None:
    """Predicted from two batches; without sample batches from the first two training steps."""
    x, y = mixed_batch(16)
    options: dict[str, Any] = {"inner": "eager", "max_gradient_noise": 0.05}
    batches = [(x, y), (x.flip(0) * 1.1, y)]
    model = gact_fx.compile(Mixed(), sample_batches=batches, **options)
    plan = gact_fx.inspect(model).plan
    assert plan is not None and plan.minibatch_variance and plan.variance is not None
    assert 0 < plan.variance <= 0.05 * plan.minibatch_variance
    model = gact_fx.compile(Mixed(), **options)
    for step in range(2):
        assert gact_fx.inspect(model).plan is None
        model(*batches[step]).backward()
    plan = gact_fx.inspect(model).plan
    assert plan is not None and plan.minibatch_variance


@pytest.mark.parametrize(
    ("correction", "minibatch", "rotated"),
    [(1.0, 1.0, math.inf), (5.0, 1.0, math.inf), (1.0, 30.0, 0.25)],
    ids=["alone", "together", "rotated"],
)
def test_too_much_noise_is_warned_of_with_a_budget_that_helps(
    correction: float, minibatch: float, rotated: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where codes were found to add more together than each alone, and where narrow codes may be rotated.

    ``rotated`` is what these add of what the others do.
    """
    tensors = replace(graph(*VALUES), correction=correction)
    if math.isfinite(rotated):
        tensors = replace(tensors, sensitivities={k: turned(s, rotated) for k, s in tensors.sensitivities.items()})
    with caplog.at_level(logging.WARNING, "gact_fx"):
        plan = choose_plan([tensors], Config(budget_bits=2.0, **OPTIONS), "m", minibatch)
        assert plan.variance is not None and plan.variance > NOISE_LIMIT * minibatch
        (found,) = re.findall(r"adds (\d+) % .* more than 10 %; budget_bits=([\d.]+) would", caplog.text)
        assert int(found[0]) == round(100 * plan.variance / minibatch)
        caplog.clear()
        better = choose_plan([tensors], Config(budget_bits=float(found[1]), **OPTIONS), "m", minibatch)
    assert better.variance is not None and better.variance <= NOISE_LIMIT * minibatch
    assert not caplog.records


def test_a_width_for_all_that_would_help_is_whole(caplog: pytest.LogCaptureFixture) -> None:
    def noise_at(bits: float) -> str:
        caplog.clear()
        choose_plan([graph(*VALUES)], Config(budget_bits=bits, adaptive=False, **OPTIONS), "m", 1.0)
        return caplog.text

    with caplog.at_level(logging.WARNING, "gact_fx"):
        (bits,) = re.findall(r"budget_bits=(\d+) would bring it back", noise_at(2))
        assert int(bits) > 2 and not noise_at(int(bits)) and noise_at(int(bits) - 1)
        choose_plan([graph(*VALUES)], Config(budget_bits=2, adaptive=False, **OPTIONS), "m", 1e-9)
    assert "no budget_bits would bring it back" in caplog.text


def test_noise_is_warned_of_by_a_single_gradient(caplog: pytest.LogCaptureFixture) -> None:
    """No minibatch's gradient varies by more than its squared norm, in the mean."""
    config = Config(budget_bits=2.0, **OPTIONS)
    with caplog.at_level(logging.WARNING, "gact_fx"):
        plan = choose_plan([graph(*VALUES)], config, "m", None)
        assert plan.variance is not None and not caplog.records
        choose_plan([graph(*VALUES)], config, "m", 100 * plan.variance, squared_norm=plan.variance)
        choose_plan([graph(*VALUES)], config, "m", None, squared_norm=11 * plan.variance)
        assert not caplog.records
        choose_plan([graph(*VALUES)], config, "m", None, squared_norm=5 * plan.variance)
    assert "adds at least 20 % to the variance of the minibatch gradient" in caplog.text


@pytest.mark.parametrize("training", [True, False], ids=["first step", "sample batch"])
def test_a_model_is_warned_of_noise_on_its_first_batch(training: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    x, y = mixed_batch(1)
    options: dict[str, Any] = {"rounding": "stochastic"} | ({} if training else {"sample_batches": [(x, y)]})
    with caplog.at_level(logging.WARNING, "gact_fx"):
        model = gact_fx.compile(Mixed(), inner="eager", budget_bits=1, min_elements=64, **options)
        model(x, y).backward()
    assert "adds at least" in caplog.text


@pytest.mark.parametrize("minibatch", [0.0, 1e-6])
def test_the_budget_that_is_named_exists(minibatch: float, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gact_fx"):
        choose_plan([graph(*VALUES, exact=True)], Config(budget_bits=2.0, **OPTIONS), "m", minibatch)
    named = [float(bits) for bits in re.findall(r"budget_bits=([\d.]+)", caplog.text)]
    assert all(Config(budget_bits=bits).budget_bits == bits for bits in named)


def test_the_variance_is_as_measured_where_the_menus_overstate_it() -> None:
    """The least sensitive are planned as a hundredth of the median, which says nothing about what they add."""
    tensors = graph(1e-6, 1e-6, 1.0, 1.0, 1.0)
    plan = choose_plan([tensors], Config(budget_bits=2.0, **OPTIONS), "m", None)
    widths = [entry.bits for entry in plan.graphs[0].tensors]
    values = (1e-6, 1e-6, 1.0, 1.0, 1.0)
    assert plan.variance == pytest.approx(sum(v * step_variance(b) for v, b in zip(values, widths, strict=True) if b))
    assert plan.variance == plan.variance_on({"graph": tensors.sensitivities})


def test_a_plan_is_compared_to_the_one_before_by_what_was_measured() -> None:
    """A floor under one side alone would hide what the new plan brings."""
    values = (*[1e-6] * 90, *[1.0] * 91)
    tensors = graph(*values)
    config = Config(budget_bits=2.0, **OPTIONS)
    plan = choose_plan([tensors], config, "m", None)
    entries = plan.graphs[0].tensors
    worse = (*entries[:-1], replace(entries[-1], code=Code(1)))
    before = replace(plan, graphs=(replace(plan.graphs[0], tensors=worse),))
    assert is_better(plan, before, [tensors], config)
    assert not is_better(before, plan, [tensors], config) and not is_better(plan, plan, [tensors], config)


def test_unmeasured_variances_are_not_claimed() -> None:
    plan = choose_plan([replace(graph(*VALUES), sensitivities={})], Config(**OPTIONS), "m", 1.0)
    assert plan.variance is None and {entry.sensitivity for entry in plan.graphs[0].tensors} == {None}


def test_not_adaptive_is_one_width() -> None:
    tensors = graph(*VALUES, exact=True)
    first, *rest = tensors.analysis.encodings
    assert isinstance(first, Quantize)
    analysis = GraphAnalysis(tensors.analysis.saved, (replace(first, is_curved=True), *rest))
    config = Config(budget_bits=3, adaptive=False)
    plan = choose_plan([replace(tensors, analysis=analysis)], config, "m", None, squared_norm=1.0)
    found = [replace(entry.code, seed=0) for entry in plan.graphs[0].tensors if entry.code is not None]
    assert found == [Code(6, "stochastic", 256), *[Code(3, "stochastic", 256)] * 3]


@pytest.mark.parametrize(("share", "stored"), [(1 / 20, "coefficients"), (1 / 10, "values")])
def test_not_adaptive_takes_more_bytes_for_far_less_noise(share: float, stored: str) -> None:
    tensors = graph(*VALUES)
    key, *_ = tensors.sensitivities
    first, *rest = tensors.analysis.encodings
    assert isinstance(first, Quantize)
    coefficients = Coefficients(("square", "sine"), torch.float32, 2 * NUMEL, (), 0, (), False)
    analysis = GraphAnalysis(tensors.analysis.saved, (replace(first, bends=True, coefficients=coefficients), *rest))
    biases = dict.fromkeys(measured(1.0).variances, 0.0)
    bent = replace(measured(1.0), squared_biases=biases, others={"coefficients": measured(share)})
    tensors = replace(tensors, analysis=analysis, sensitivities={**tensors.sensitivities, key: bent})
    config = Config(budget_bits=4, adaptive=False, **OPTIONS)
    assert choose_plan([tensors], config, "m", None).graphs[0].tensors[0].stored == stored


def test_what_has_to_be_exact_takes_no_bits_from_the_others() -> None:
    of = graph(10.0, 100.0, 1000.0, exact=True)
    (first, *others), (exact, *tensors) = of.analysis.encodings, of.analysis.saved
    assert isinstance(first, Quantize)
    nowhere = Sensitivity(math.inf, dict.fromkeys(of.sensitivities[exact.key].variances, math.inf))
    bent = GraphAnalysis(of.analysis.saved, (replace(first, bends=True), *others))
    with_exact = replace(of, analysis=bent, sensitivities={**of.sensitivities, exact.key: nowhere})
    alone = replace(of, analysis=GraphAnalysis(tuple(tensors), tuple(others)))
    plans = [choose_plan([each], Config(budget_bits=4, **OPTIONS), "", None) for each in (with_exact, alone)]
    entries = [plan.graphs[0].entries() for plan in plans]
    entry = entries[0].pop(exact.key)
    assert entry.code is None and "could not be measured" in entry.reason
    assert {key: e.bits for key, e in entries[0].items()} == {key: e.bits for key, e in entries[1].items()}


def test_two_graphs_share_one_budget() -> None:
    calm, wild = graph(1.0, 1.0), replace(graph(1e6, 1e6), fingerprint="wild")
    plan = choose_plan([calm, wild], Config(budget_bits=4.0, **OPTIONS), "m", None)
    widths = {entry.fingerprint: [t.bits or math.inf for t in entry.tensors] for entry in plan.graphs}
    assert max(widths["graph"]) < 4 < min(widths["wild"])


def test_a_bound_on_noise_asks_for_more_bits_and_for_fewer() -> None:
    """By a plan that is too noisy on what is measured now, or holds more than it must."""
    tensors = graph(*[1.0] * 20)
    config = Config(max_gradient_noise=0.1, **OPTIONS)
    plans = [choose_plan([tensors], config, "m", minibatch) for minibatch in (1.0, 1e2, 1.02e2, 1e4)]
    for now in plans:
        for before in plans:
            is_other = now.choices() != before.choices()
            assert now.variance is not None and before.variance is not None and now.minibatch_variance is not None
            too_noisy = before.variance > 0.1 * now.minibatch_variance
            fewer = now.variance > 2 * before.variance
            if is_other and (too_noisy or fewer):
                assert is_better(now, before, [tensors], config)
            if not is_other:
                assert not is_better(now, before, [tensors], config)


def test_a_plan_of_another_budget_that_nobody_asked_for_is_not_taken() -> None:
    tensors = graph(*[1.0] * 20)
    before, plan = (choose_plan([tensors], Config(budget_bits=bits, **OPTIONS), "m", None) for bits in (8.0, 4.0))
    assert not is_better(plan, before, [tensors], Config(budget_bits=4.0))


def test_under_a_bound_tensors_that_a_plan_does_not_know_ask_for_another_one() -> None:
    tensors = graph(*[1.0] * 20)
    plan = choose_plan([tensors], Config(max_gradient_noise=0.1, **OPTIONS), "m", 1.0)
    known = replace(plan.graphs[0], tensors=plan.graphs[0].tensors[1:])
    before = replace(plan, graphs=(known,), variance=0.0)
    assert is_better(plan, before, [tensors], Config(max_gradient_noise=0.1))
