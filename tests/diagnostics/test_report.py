import json
import sys
from typing import Any

import pytest
import torch
from activation_bytes import activation_bytes
from conftest import Mixed, mixed_batch
from torch import nn
from torch.nn import functional as F

import gact_fx
from gact_fx import Report
from gact_fx.diagnostics.modules import OTHERS, OUTSIDE, by_module
from gact_fx.passes import PIPELINE, find_heads


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


def test_the_table_has_a_line_for_each_tensor_and_json_has_all(report: Report) -> None:
    lines = report.table().splitlines()
    assert lines[0].split()[:4] == ["graph", "module", "tensor", "op"]
    assert lines[-1].startswith("held for backward:")
    assert sum(bool(row.bytes_before or row.bytes_after) for row in report.rows) == len(lines) - 3
    data = json.loads(report.to_json())
    assert len(data["rows"]) == len(report.rows) and data["ratio"] == report.ratio


def test_printed_it_fits_a_screen_and_adds_up_by_module(report: Report) -> None:
    lines = str(report).splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 140
    assert lines[1].split() == ["module", "before", "after", "ratio", "bits", "noise"]
    names = {name for name, _ in Mixed().named_modules()} | {OUTSIDE, OTHERS}
    found = by_module(report.rows)
    assert {line.name for line in found} <= names
    assert sum(line.bytes_before for line in found) == report.bytes_before
    assert sum(line.bytes_after for line in found) == report.bytes_after
    assert sum(line.noise or 0 for line in found) == pytest.approx(1)


def test_the_variance_of_the_rows_is_that_of_the_plan(report: Report) -> None:
    assert report.plan is not None and report.plan.variance is not None
    assert sum(row.variance or 0 for row in report.rows) == pytest.approx(report.plan.variance, rel=0.5)


def test_a_data_frame_has_the_rows(report: Report) -> None:
    frame = report.to_dataframe()
    assert len(frame) == len(report.rows)
    assert int(frame.bytes_after.sum()) == report.bytes_after and "variance" in frame.columns


def test_without_pandas_the_extra_is_named(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"gact_fx\[report\]"):
        report.to_dataframe()


def test_graphs_can_be_read(report: Report) -> None:
    (graph,) = report.graphs
    assert "gact_fx.compress" in graph.forward.print_readable(print_output=False)
    assert "gact_fx.decompress" in graph.backward.print_readable(print_output=False)
    others = ("weigh_plain_cut", "choose_products", "spread_numbers", "decode_at_use", "swap_codes", "fuse_codec")
    ran = [each.name for each in PIPELINE if each.name not in others]
    assert [stage.name for stage in graph.stages] == ran
    (edit,) = [stage for stage in graph.stages if stage.name == "insert_compression"]
    assert edit.before and edit.after and "gact_fx." not in edit.before[0] and "gact_fx.compress" in edit.after[0]


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_bytes_are_those_that_autograd_holds(inner: str) -> None:
    batch = mixed_batch(32)
    model = gact_fx.compile(Mixed(dropout=0.1), inner=inner, sample_batches=[batch])
    loss = model(*batch)
    held = activation_bytes(loss, exclude=[*model.parameters(), *model.buffers(), *batch])
    assert held == pytest.approx(gact_fx.inspect(model).bytes_after, rel=0.02)


def test_a_small_saving_is_blamed_on_what_is_largest() -> None:
    class Own(nn.LSTM):
        """Which Dynamo leaves to eager PyTorch, whose kernel saves a workspace."""

        def forward(self, x: torch.Tensor, state: Any = None) -> Any:  # type: ignore[override]
            return super().forward(x, state)

    model = gact_fx.compile(Own(16, 32), inner="eager")
    for _ in range(2):
        model(torch.randn(8, 4, 16))[0].sum().backward()
    report = gact_fx.inspect(model)
    largest = max(report.rows, key=lambda row: row.bytes_after)
    last = str(report).splitlines()[-1]
    assert report.ratio < 2 and report.warnings[-1] in last
    assert "less than 2x" in last and largest.reason in last and "graph_breaks" in last


class LanguageModel(nn.Module):
    """Its loss beside its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(500, 16), nn.Linear(16, 16), nn.Linear(16, 500)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(F.gelu(self.inner(self.embedding(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits


@pytest.mark.parametrize("loss_only", [False, True])
def test_what_logits_cost_is_said(loss_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_heads, "MIN_NUMEL", 1)
    model, tokens = LanguageModel(), torch.randint(0, 500, (4, 32))
    gact_fx.compile(model, inner="eager", min_elements=64, loss_only=loss_only)
    for _ in range(2):
        model(tokens)[0].backward()
    report = gact_fx.inspect(model)
    nbytes = 4 * 32 * 500 * 4
    assert (report.logits.whole, report.logits.avoided) == ((0, nbytes) if loss_only else (nbytes, 0))
    (line,) = (line for line in str(report).splitlines() if line.startswith("logits:"))
    assert line.split()[1:3] == ["0.26", "MB"] or line.split()[1:3] == ["0.26", "MB,"]
    assert ("loss_only=True" in line) == (not loss_only)
    assert json.loads(report.to_json())["logits"] == {"whole": report.logits.whole, "avoided": report.logits.avoided}
