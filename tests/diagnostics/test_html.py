"""The page that a report saves: one file, escaped, small, and true to the report."""

import base64
import gzip
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from conftest import Mixed, mixed_batch
from torch import nn

import gact_fx
from gact_fx import Report
from gact_fx.diagnostics.charts import Axis, Point, scatter
from gact_fx.diagnostics.html import page
from gact_fx.diagnostics.memory_timeline import Timeline
from gact_fx.diagnostics.report_rows import Row
from gact_fx.training.progress import size


@pytest.fixture(scope="module")
def report() -> Report:
    model = gact_fx.compile(Mixed(dropout=0.1), inner="eager", sample_batches=[mixed_batch(32)])
    model(*mixed_batch(32)).backward()
    return gact_fx.inspect(model)


class Checker(HTMLParser):
    """Sees to it that tags are closed in their order, and collects what a browser would fetch."""

    EMPTY = ("meta", "line", "wbr", "i", "circle", "polygon")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.fetched += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open and not checker.fetched and "@import" not in text and "url(" not in text
    return checker


def test_it_is_one_file_that_fetches_nothing(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    report.save(path)
    text = path.read_text(encoding="utf-8")
    assert len(text) < 1_000_000
    assert check(text).seen.count("svg") == 4
    assert all(row.name in text for row in report.rows if row.bytes_before)


def test_the_graphs_are_those_of_the_passes(report: Report) -> None:
    packed = re.findall(r'<script type="text/plain" id="text\d+">([^<]*)</script>', page(report, Timeline()))
    texts = [gzip.decompress(base64.b64decode(text)).decode() for text in packed]
    stages = [stage for graph in report.graphs for stage in graph.stages if stage.before != stage.after]
    assert stages and all(text in texts for stage in stages for text in (*(stage.before or ()), *(stage.after or ())))


def test_what_comes_from_the_model_is_escaped() -> None:
    evil = "<script>alert(1)</script>"
    row = Row(
        graph=0, name=evil, module=evil, op=evil, shape=(4,), dtype=evil, encoding="keep", bits=None, rounding=None,
        group_size=None, bytes_before=4, bytes_after=4, copies=1, reason=evil,
    )  # fmt: skip
    text = page(Report((row,), (), None, evil, warnings=(evil,)), Timeline())
    assert evil not in text and "&lt;script&gt;alert(1)" in text
    check(text)
    assert evil not in scatter([Point(1, 1, evil)], Axis(evil), Axis(evil), label=evil)


def test_a_notebook_shows_the_page_in_a_frame(report: Report) -> None:
    text = report._repr_html_()
    assert text.startswith("<iframe") and "<h1>" not in text and "&lt;h1&gt;" in text


def test_a_name_that_is_not_html_is_an_error(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"does not end with \.html"):
        report.save(tmp_path / "report.json")


def test_a_report_without_rows_is_a_page_too() -> None:
    check(page(Report((), (), None, "compression is off"), Timeline()))


def test_between_forward_and_backward_the_timeline_holds_what_the_report_says(report: Report) -> None:
    timeline = report._timeline
    for step, held in ((timeline.before, report.bytes_before), (timeline.after, report.bytes_after)):
        crossing = sum(b.nbytes for b in step.buffers if b.start < step.forward <= b.end)
        assert crossing == held
        assert all(0 <= b.start <= b.end < step.length for b in step.buffers)
    # The charts say what the report does.
    assert timeline.after.activations == report.peak_activations == max(timeline.after.levels())
    assert f"after: at most {size(timeline.after.activations)} at a time" in page(report, timeline)


def test_graphs_run_backward_in_reverse() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x).square().mean()

    model = gact_fx.compile(Broken(), inner="eager", min_elements=64)
    for _ in range(2):
        model(torch.randn(64, 64)).backward()
    report = gact_fx.inspect(model)
    before = report._timeline.before
    assert len(report.graphs) == 2
    crossing = [b for b in before.buffers if b.start < before.forward <= b.end]
    first, second = ([b for b in crossing if b.module.startswith(name)] for name in ("a", "b"))
    assert first and second and max(b.end for b in first) > max(b.end for b in second)
    assert max(b.start for b in first) < min(b.start for b in second)
