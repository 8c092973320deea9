import json

import pytest
import torch
from activation_bytes import activation_bytes
from conftest import Mixed, mixed_batch
from torch import nn

import gact_fx
from gact_fx import Report
from gact_fx.passes import PIPELINE


@pytest.fixture(scope="module")
def report() -> Report:
    model = gact_fx.compile(Mixed(dropout=0.1), inner="eager", sample_batches=[mixed_batch(32)])
    model(*mixed_batch(32)).backward()
    return gact_fx.inspect(model)


def test_rows_say_what_and_why(report: Report) -> None:
    assert {row.encoding for row in report.rows} >= {"quantize", "mask", "keep"}
    for row in report.rows:
        assert row.reason or row.encoding == "quantize"
        assert (row.bits is not None) == (row.encoding in ("quantize", "mask"))
        assert row.bytes_after <= row.bytes_before or row.encoding == "quantize"


def test_totals_add_up(report: Report) -> None:
    assert report.ratio == report.bytes_before / report.bytes_after
    assert report.average_bits is not None and 2 < report.average_bits <= 4.6


def test_it_prints_a_table_and_json(report: Report) -> None:
    lines = str(report).splitlines()
    assert lines[0].split()[:3] == ["graph", "tensor", "op"]
    assert lines[-1].startswith("held for backward:")
    data = json.loads(report.to_json())
    assert len(data["rows"]) == len(report.rows) and data["ratio"] == report.ratio


def test_graphs_can_be_read(report: Report) -> None:
    (graph,) = report.graphs
    assert "gact_fx.compress" in graph.forward.print_readable(print_output=False)
    assert "gact_fx.decompress" in graph.backward.print_readable(print_output=False)
    others = ("weigh_plain_cut", "choose_products", "swap_codes", "fuse_codec")
    ran = [each.name for each in PIPELINE if each.name not in others]
    assert [stage.name for stage in graph.stages] == ran
    (edit,) = [stage for stage in graph.stages if stage.name == "insert_compression"]
    assert edit.before and edit.after and "ops.gact_fx" not in edit.before[0] and "ops.gact_fx" in edit.after[0]


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_bytes_are_those_that_autograd_holds(inner: str) -> None:
    batch = mixed_batch(32)
    model = gact_fx.compile(Mixed(dropout=0.1), inner=inner, sample_batches=[batch])
    loss = model(*batch)
    held = activation_bytes(loss, exclude=[*model.parameters(), *model.buffers(), *batch])
    assert held == pytest.approx(gact_fx.inspect(model).bytes_after, rel=0.02)


def test_a_small_saving_is_blamed_on_what_is_largest() -> None:
    # Which Dynamo leaves to eager PyTorch, whose kernel saves a workspace.
    model = gact_fx.compile(nn.LSTM(16, 32), inner="eager")
    for _ in range(2):
        model(torch.randn(8, 4, 16))[0].sum().backward()
    report = gact_fx.inspect(model)
    largest = max(report.rows, key=lambda row: row.bytes_after)
    last = str(report).splitlines()[-1]
    assert report.ratio < 2
    assert last.startswith(f"the largest: {largest.name} (") and largest.reason in last
