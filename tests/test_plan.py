import copy
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Mixed, gradients, mixed_batch
from torch import nn

import gact_fx
from gact_fx import Plan
from gact_fx.plan import TensorPlan


def compiled(model: nn.Module, **options: object) -> nn.Module:
    return gact_fx.compile(model, inner="eager", **options)  # type: ignore[arg-type]


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
    plan = session_plan(compiled(Mixed(), sample_batches=[mixed_batch()]))
    with pytest.raises(ValueError, match="the plan was made for another model") as caught:
        compiled(nn.Linear(3, 4), plan=plan)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="the plan was made for group_size=256, got group_size=64"):
        compiled(Mixed(), plan=plan, group_size=64)


def test_a_plan_of_another_graph_is_refused() -> None:
    plan = session_plan(compiled(Mixed(), sample_batches=[mixed_batch()]))
    other = replace(plan, graphs=tuple(replace(graph, fingerprint="0" * 16) for graph in plan.graphs))
    with pytest.raises(Exception, match="the plan does not fit this model: it has no graph"):
        compiled(Mixed(), plan=other)(*mixed_batch())


def test_a_plan_of_another_rounding_is_refused() -> None:
    plan = session_plan(compiled(Mixed(), sample_batches=[mixed_batch()]))
    with pytest.raises(ValueError, match=r"the plan was made for rounding=.stochastic., got rounding=.dither."):
        compiled(Mixed(), plan=plan, rounding="dither")


@pytest.mark.parametrize(("bits", "rounding"), [(4, "up"), (16, "dither")])
def test_roundings_that_do_not_exist(bits: int, rounding: str) -> None:
    with pytest.raises(ValueError, match=r"gact_fx\.Plan: rounding .*, got (.up.|16)"):
        TensorPlan("aten.mm#0", bits, 0, None, rounding)
    TensorPlan("aten.mm#0", None, 0, None)


@pytest.mark.parametrize("text", ["", "{}", '{"format": 99}', "[1, 2]"])
def test_what_is_not_a_plan(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match="is not a plan of gact_fx"):
        Plan.load(tmp_path / "plan.json")


def test_models_copy_and_pickle_with_their_plan() -> None:
    model = compiled(Mixed(), sample_batches=[mixed_batch()])
    model(*mixed_batch()).backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert session_plan(twin) == session_plan(model)
        assert list(twin.state_dict()) == list(Mixed().state_dict())
        assert twin(*mixed_batch()).isfinite()
