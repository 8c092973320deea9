"""Rows by module: which modules share a line."""

import pytest

from gact_fx.diagnostics.cures import largest_exact, remedy_for
from gact_fx.diagnostics.modules import OTHERS, STAR, blocks, by_module, fold, starred
from gact_fx.diagnostics.report_rows import Row


def row(module: str, before: int = 1000, after: int = 100, **changes: object) -> Row:
    fields = {
        "graph": 0, "name": "x", "module": module, "op": "aten.mm", "shape": (250,), "dtype": "float32",
        "encoding": "quantize", "bits": 3, "rounding": "dither", "group_size": 256, "bytes_before": before,
        "bytes_after": after, "copies": 1, "reason": "", "variance": 1.0,
    }  # fmt: skip
    return Row(**{**fields, **changes})  # type: ignore[arg-type]


def test_few_modules_have_a_line_each() -> None:
    rows = [row(f"layers.{i}.mlp") for i in range(3)]
    assert [line.label for line in by_module(rows)] == ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]


def test_modules_that_hold_next_to_nothing_share_a_line() -> None:
    rows = [row("conv", 10**6), row("norm1", 64), row("norm2", 64)]
    assert [line.label for line in by_module(rows)] == ["conv", OTHERS]
    assert [line.label for line in by_module(rows[:2])] == ["conv", "norm1"]


def test_repeated_blocks_are_one_line() -> None:
    names = ("attention.query", "attention.out", "mlp.up", "mlp.down")
    rows = [row(f"encoder.layer.{i}.{name}") for i in range(12) for name in names] + [row("head")]
    lines = by_module(rows)
    assert [line.label for line in lines] == [*(f"encoder.layer.*.{name}  (12x)" for name in names), "head"]
    assert [line.bytes_before for line in lines] == [12_000] * 4 + [1000]
    assert lines[0].noise == pytest.approx(12 / 49) and lines[0].bits == 8 * 100 / 250


def test_where_there_is_no_room_modules_are_told_by_the_one_around_them() -> None:
    rows = [row(f"encoder.layer.{i}.part{j}") for i in range(3) for j in range(20)] + [row("head"), row("stem")]
    assert [line.label for line in by_module(rows)] == ["encoder.layer.*  (3x)", "head", "stem"]


def test_blocks_within_blocks_are_counted_together() -> None:
    paths = [("net", "stages", str(i), "layers", str(j), "conv") for i in range(2) for j in range(3)]
    stars = starred(paths)
    assert set(stars.values()) == {("net", "stages", STAR, "layers", STAR, "conv")}
    assert blocks(next(iter(stars.values())), paths) == 6


def test_numbered_modules_without_modules_in_them_stay_apart() -> None:
    paths = [("mlp", "0"), ("mlp", "2")]
    assert starred(paths) == {path: path for path in paths}


def test_more_modules_side_by_side_than_there_are_lines() -> None:
    rows = [row(f"expert{i}", before=1000 + i) for i in range(40)]
    lines = by_module(rows)
    assert len(lines) == 12 and lines[-1].name == OTHERS
    assert sum(line.bytes_before for line in lines) == sum(r.bytes_before for r in rows)
    assert "expert39" in {line.name for line in lines}


def test_every_module_has_a_line_and_no_more_than_there_is_room_for() -> None:
    paths = {("a", *"b" * (i % 4), f"m{i}"): 1 + i for i in range(60)}
    for most in (1, 3, 12, 100):
        lines = fold(paths, most)
        assert lines.keys() == paths.keys() and len(set(lines.values())) <= most


def test_the_largest_exact_tensors_are_kinds_with_a_remedy() -> None:
    def kept(module: str, nbytes: int, reason: str) -> Row:
        return row(module, nbytes, nbytes, encoding="keep", bits=None, reason=reason)

    linear = "backward is not linear in this tensor (aten.exp.default)"
    rows = [kept(f"layer.{i}.norm", 50, "a statistic of rows or channels") for i in range(4)]
    rows += [kept(f"layer.{i}.scores", 900, linear) for i in range(4)] + [row("layer.0.mlp")]
    first, second = largest_exact(rows)
    assert (first.module, first.count, first.nbytes) == ("layer.*.scores  (4x)", 4, 3600)
    assert "checkpoint" in first.remedy and second.remedy.startswith("none needed")
    assert remedy_for("something new") == ""
