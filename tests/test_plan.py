import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Mixed, Trace, analyze, gradients, mixed_batch
from torch import nn

import gact_fx
from gact_fx import Plan
from gact_fx.codec.code import Code
from gact_fx.config import Config
from gact_fx.plan import GraphPlan, TensorPlan, differences, same_keys, signature
from gact_fx.records import SavedTensor
from gact_fx.training.rewrite import graph_plan


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    return gact_fx.compile(model, inner="eager", **options)


def session_plan(model: nn.Module) -> Plan:
    plan = gact_fx.inspect(model).plan
    assert plan is not None
    return plan


def test_save_load_and_run_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = compiled(Mixed(), sample_batches=[mixed_batch()])
    model(*mixed_batch()).backward()
    first = gradients(model)
    session_plan(model).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan == session_plan(model)
    torch.manual_seed(0)
    again = compiled(Mixed(), plan=plan)
    again(*mixed_batch()).backward()
    for a, b in zip(gradients(again), first, strict=True):
        assert torch.equal(a, b)


def test_a_plan_fits_another_batch_size() -> None:
    plan = session_plan(compiled(Mixed(), sample_batches=[mixed_batch()]))
    model = compiled(Mixed(), plan=plan)
    model(*mixed_batch(32)).backward()
    assert gact_fx.inspect(model).ratio > 2


def test_a_plan_of_another_model_is_refused() -> None:
    plan = session_plan(compiled(Mixed(), sample_batches=[mixed_batch()], group_size=256))
    with pytest.raises(ValueError, match="the plan was made for another model") as caught:
        compiled(nn.Linear(3, 4), plan=plan)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="the plan was made for group_size=256, got group_size=64"):
        compiled(Mixed(), plan=plan, group_size=64)


def test_a_plan_of_another_graph_is_refused() -> None:
    plan = session_plan(compiled(Mixed(), sample_batches=[mixed_batch()]))
    (graph,) = plan.graphs
    saved = ("aten.mm#0 torch.float32", *graph.saved[1:])
    other = replace(plan, graphs=(replace(graph, fingerprint="0" * 16, saved=saved),))
    lost = r"\S+ \(\w+\)"
    message = f"the model saves, and the plan does not know, {lost}; the plan has, and the model does not save, aten.mm"
    with pytest.raises(Exception, match=message):
        compiled(Mixed(), plan=other)(*mixed_batch())
    with pytest.raises(Exception, match="the plan does not fit this model: it has no graphs"):
        compiled(Mixed(), plan=replace(plan, graphs=()))(*mixed_batch())


def tensor(key: str, rank: int, owner: str = "nobody") -> SavedTensor:
    return SavedTensor("t", key, "op", "", (2,) * rank, (1,) * rank, torch.float32, 0, 8, owner)


def test_keys_mean_other_tensors_where_more_are_saved() -> None:
    here = (tensor("aten.mm#0", 2), tensor("aten.mm#1", 2), tensor("aten.bmm#0", 3), tensor("aten.exp#0", 2))
    saved = tuple(f"{key} torch.float32" for key in ("aten.mm#0", "aten.bmm#0", "aten.exp#0", "aten.exp#1"))
    assert same_keys(here, GraphPlan("f", (), saved)) == {"aten.bmm#0"}
    assert same_keys(here, GraphPlan("f", (), signature(here))) == {t.key for t in here}


def test_the_nearest_plan_gives_no_width_to_another_tensor(trace: Trace) -> None:
    layers = (nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU())
    analysis = analyze(trace(nn.Sequential(*layers), torch.randn(64, 32)))
    keys = [t.key for t, _ in analysis.quantized()]
    assert {"aten.addmm#0", "aten.addmm#1", "aten.tanh#0"} <= set(keys)
    # Made for a graph that is cut a little differently: the second result of a layer is the third one here.
    saved = tuple(value for value in signature(analysis.saved) if not value.startswith("aten.addmm#1"))
    nearest = GraphPlan("0" * 16, tuple(TensorPlan(key, Code(1)) for key in keys), saved)
    chosen = graph_plan(analysis, Plan(4, "", (nearest,)), Config(), must_fit=False).entries()
    widths = {key: None if entry.code is None else entry.code.bits for key, entry in chosen.items()}
    assert widths["aten.tanh#0"] == 1
    assert 1 not in {bits for key, bits in widths.items() if key.startswith("aten.addmm")}


def test_differences_name_the_tensors() -> None:
    known = signature((tensor("aten.mm#0", 2), tensor("aten.relu#0", 4), tensor("input#0", 2, "caller")))
    plan = Plan(4, "", (GraphPlan("far", (), ("aten.sin#0 torch.float32 1",)), GraphPlan("near", (), known)))
    found = differences(plan, (tensor("aten.mm#0", 2), tensor("aten.bmm#0", 3)))
    assert found == (
        "the model saves, and the plan does not know, aten.bmm#0 (float32); "
        "the plan has, and the model does not save, aten.relu#0 (float32)"
    )
    assert differences(plan, (tensor("aten.relu#0", 4), tensor("aten.mm#0", 2))).endswith("in another order")
    assert differences(plan, tuple(tensor(f"new#{i}", 1) for i in range(7))).split(";")[0].endswith("and 2 more")


def test_every_field_survives_the_file(tmp_path: Path) -> None:
    tensors = (TensorPlan("a#0", Code(2, "dither", 64, 3), 0.5, True), TensorPlan("b#0", None))
    plan = Plan(4.5, "m", (GraphPlan("f", tensors, ("a#0 torch.float32 2",)),), "off", 1e-3, 0.25)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_plans_that_say_who_shared_codes_are_read(tmp_path: Path) -> None:
    """Version 0.1 wrote it of every tensor, and a seed of what is exact."""
    plan = Plan(
        4, "m", (GraphPlan("f", (TensorPlan("a#0", Code(2, "dither", 64, 3), 0.5), TensorPlan("b#0", None)), ()),)
    )
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    for tensor in data["graphs"][0]["tensors"]:
        tensor.update(shared=True, seed=tensor["seed"] or 7)
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_plan_of_another_recomputation_is_refused() -> None:
    plan = session_plan(compiled(Mixed(), sample_batches=[mixed_batch()], recompute="off"))
    with pytest.raises(ValueError, match=r"the plan was made for recompute='off', got recompute='auto'"):
        compiled(Mixed(), plan=plan)
    compiled(Mixed(), plan=plan, recompute="off")(*mixed_batch()).backward()


def test_a_plan_of_another_rounding_is_refused() -> None:
    plan = session_plan(compiled(Mixed(), sample_batches=[mixed_batch()], rounding="stochastic"))
    with pytest.raises(ValueError, match=r"the plan was made for rounding=.stochastic., got rounding=.dither."):
        compiled(Mixed(), plan=plan, rounding="dither")


@pytest.mark.parametrize(("bits", "rounding"), [(4, "up"), (16, "dither")])
def test_roundings_that_do_not_exist(bits: int, rounding: str) -> None:
    with pytest.raises(ValueError, match=r"gact_fx\.Plan: rounding .*, got (.up.|16)"):
        TensorPlan("aten.mm#0", Code(bits, rounding))
    TensorPlan("aten.mm#0", None)


@pytest.mark.parametrize("text", ["", "{}", '{"format": 99}', "[1, 2]"])
def test_what_is_not_a_plan(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(TypeError, match="a plan is read from a path, got dict"):
        Plan.load({})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not a plan of gact_fx"):
        Plan.load(tmp_path / "plan.json")


def test_models_copy_and_pickle_with_their_plan() -> None:
    model = compiled(Mixed(), sample_batches=[mixed_batch()])
    model(*mixed_batch()).backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert session_plan(twin) == session_plan(model)
        assert list(twin.state_dict()) == list(Mixed().state_dict())
        assert twin(*mixed_batch()).isfinite()


def test_a_plan_has_spent_its_budget() -> None:
    plan = session_plan(compiled(Mixed(), sample_batches=[mixed_batch()], budget_bits=3))
    compiled(Mixed(), plan=plan)
    compiled(Mixed(), plan=plan, budget_bits=3)
    compiled(Mixed(), plan=plan, budget_bytes=10_000, profile_every=5)
    for option, value in (("budget_bits", 2), ("budget_bytes", 10_000), ("max_gradient_noise", 0.1)):
        with pytest.raises(ValueError, match=f"{option}={value} does nothing beside plan="):
            compiled(Mixed(), plan=plan, **{option: value})


def test_a_given_plan_that_was_made_anew_meets_an_unknown_graph() -> None:
    """It then serves like any other plan, and is not said not to fit."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, other: bool = False) -> torch.Tensor:
            x = torch.tanh(self.first(x))
            return (torch.sigmoid(self.second(x)).exp() if other else x).square().mean()

    x = torch.randn(256, 64)
    options = {"loss_fn": lambda model, batch: model(*batch)}
    plan = session_plan(compiled(Branches(), sample_batches=[(x,)], **options))
    narrow = [tuple(replace(t, code=t.code and replace(t.code, bits=1)) for t in g.tensors) for g in plan.graphs]
    graphs = tuple(replace(g, tensors=tensors) for g, tensors in zip(plan.graphs, narrow, strict=True))
    given = replace(plan, graphs=graphs, variance=1e9)
    model = compiled(Branches(), plan=given, profile_every=2)
    for _ in range(6):
        model(x * torch.rand(()) * 3).backward()
        if session_plan(model).choices() != given.choices():
            break
    assert session_plan(model).choices() != given.choices()
    # The first graph to be compiled with the new plan.
    model(x, other=True).backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model))


def test_sixteen_bits_are_for_float32() -> None:
    """A plan for another dtype does not fit, whatever its widths."""
    model = compiled(Mixed(), sample_batches=[mixed_batch()], budget_bits=16)
    plan = session_plan(model)
    x, y = mixed_batch()
    half = compiled(Mixed().bfloat16(), sample_batches=[(x.bfloat16(), y)], budget_bits=16)
    assert {t.bits for g in session_plan(half).graphs for t in g.tensors} & {16} == set()
    assert 16 in {t.bits for g in plan.graphs for t in g.tensors}


def test_a_seed_beside_a_plan_gives_it_other_noise() -> None:
    x = torch.randn(64, 64)

    def gradient(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = gact_fx.compile(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), inner="eager", **options
        )
        model(x).square().mean().backward()
        plans.append(gact_fx.inspect(model).plan)
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    plans: list[Any] = []
    gradient(sample_batches=[(x,)], loss_fn=lambda m, b: m(*b).square().mean())
    first, again, other = (gradient(plan=plans[0], **seed) for seed in ({}, {}, {"seed": 1}))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert plans[-1].choices() == plans[0].choices()


def test_a_plan_serves_a_first_call_in_eval(caplog: pytest.LogCaptureFixture) -> None:
    def network() -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64))

    x = torch.randn(64, 64)
    options: dict[str, Any] = {"sample_batches": [(x,)], "loss_fn": lambda m, b: m(*b).square().mean()}
    plan = gact_fx.inspect(gact_fx.compile(network(), inner="eager", **options)).plan
    model = gact_fx.compile(network(), inner="eager", plan=plan)
    with caplog.at_level("WARNING", "gact_fx"):
        model.eval()(x).square().mean().backward()
    assert "runs the plan of the nearest one" in caplog.text
    model.train()(x).square().mean().backward()
    assert gact_fx.inspect(model).ratio > 2
