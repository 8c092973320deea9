"""The Python blocks of README.md and docs/*.md run, and what the pages say of the code is so.

A comment in front of a block, which readers do not see, says what the block needs:

- ``<!-- test: network -->``: it runs in a fresh namespace with the names that a function of `SETUPS` gives;
- ``<!-- test: continues -->``: it runs in the namespace of the block before;
- ``<!-- slow test: ... -->``: the same, in the slow tier;
- ``<!-- compiled only: REASON -->``: it is only compiled.

Blocks run in a folder of their own. ``gact_fx.compile`` has ``inner="eager"`` there, for the sake of time. `mkdocs
build --strict` checks the links between pages.
"""

from __future__ import annotations

import ast
import functools
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gact_fx
import gact_fx.integrations

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WAYS = ("test", "slow test", "compiled only")
_BLOCK = re.compile(r"^(?:<!-- (?P<way>[a-z ]+): (?P<what>.*?) -->\n)?```python\n(?P<code>.*?)^```$", re.M | re.S)
Namespace = dict[str, Any]


@dataclass(frozen=True)
class Block:
    """One block of a page, from ``line`` on; ``way`` and ``what`` are those of the comment in front of it."""

    page: str
    line: int
    way: str
    what: str
    code: str

    def run(self, namespace: Namespace) -> None:
        # Lines in tracebacks are those of the page.
        exec(compile("\n" * (self.line - 1) + self.code, self.page, "exec"), namespace)


def blocks_of(page: Path) -> list[Block]:
    text, name = page.read_text(), str(page.relative_to(ROOT))
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(name, line, match["way"] or "", match["what"] or "", match["code"]))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def network() -> Namespace:
    """A network of 64 features and 10 classes, and a loader with four batches of it."""
    data = torch.utils.data.TensorDataset(torch.randn(128, 64), torch.randint(0, 10, (128,)))
    loader = torch.utils.data.DataLoader(data, 32)
    x, y = next(iter(loader))
    return {"model": build_model(), "loader": loader, "x": x, "y": y}


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 10))


def compiled() -> Namespace:
    """The network with a plan, having trained for two steps; its batches, its loss, and how it is built."""
    names = network()
    batches = list(names["loader"])

    def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    model = gact_fx.compile(names["model"])
    for batch in batches[:2]:
        loss_fn(model, batch).backward()
    return {**names, "gact_fx": gact_fx, "batches": batches, "loss_fn": loss_fn, "build_model": build_model}


def transformers() -> Namespace:
    """A small BERT as `from_pretrained` returns one, a batch for it, and a dataset of its rows."""
    pytest.importorskip("transformers")
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=16, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128,
        max_position_embeddings=32,
    )  # fmt: skip
    batch = {"input_ids": torch.randint(0, 16, (8, 32)), "labels": torch.randint(0, 2, (8,))}
    rows = [{name: value[i] for name, value in batch.items()} for i in range(8)] * 4
    return {"model": BertForSequenceClassification(config).train(False), "batch": batch, "dataset": rows}


def layers() -> Namespace:
    """A model of four equal layers, the loss of its outputs, and batches of few rows."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    batches = [(torch.randn(32, 64), torch.randn(32, 64)) for _ in range(2)]
    return {"model": Deep(), "loss_fn": nn.functional.mse_loss, "small_batches": batches}


def nothing() -> Namespace:
    return {}


SETUPS: dict[str, Callable[[], Namespace]] = {
    setup.__name__: setup for setup in (network, compiled, transformers, layers, nothing)
}


def runs() -> Iterator[Any]:
    """What runs together: a block, and those after it that continue it."""
    together: list[Block] = []
    for block in [*BLOCKS, None]:
        if block is not None and block.what == "continues":
            together.append(block)
            continue
        if together and together[0].way in ("test", "slow test"):
            marks = [pytest.mark.slow] if together[0].way == "slow test" else []
            yield pytest.param(together, id=f"{together[0].page}:{together[0].line}", marks=marks)
        together = [block] if block is not None else []


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}:{block.line}")
def test_every_block_says_how_it_is_tested(block: Block) -> None:
    assert block.way in WAYS, f"{block.page}:{block.line}: put <!-- test: NAME --> in front of it; see {__file__}"
    if block.way == "compiled only":
        assert len(block.what) > 10, "give a reason"
    else:
        assert block.what in (*SETUPS, "continues"), f"{block.page}:{block.line}"
    compile(block.code, block.page, "exec")


@pytest.mark.parametrize("together", list(runs()))
def test_block_runs(together: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in re.findall(r"(?:import|from) (lightning|accelerate|peft|transformers)\b", together[0].code):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(gact_fx, "compile", functools.partial(gact_fx.compile, inner="eager"))
    level = logging.getLogger("gact_fx").level
    namespace = {"__name__": "__main__", **SETUPS[together[0].what]()}
    try:
        for block in together:
            block.run(namespace)
    finally:
        logging.getLogger("gact_fx").setLevel(level)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_readme_links_to_files_that_exist() -> None:
    """mkdocs does not read it."""
    for page in ("README.md", "CONTRIBUTING.md"):
        targets = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text())
        missing = [target for target in targets if "://" not in target and not (ROOT / target).exists()]
        assert targets and not missing, page


def test_benchmarks_that_pages_name_exist_with_the_options_that_they_name() -> None:
    named = [
        (page.name, *match)
        for page in PAGES
        for match in re.findall(r"python benchmarks/(\w+\.py)((?: [\w.-]+)*)", page.read_text())
    ]
    missing = []
    for page, name, arguments in named:
        path = ROOT / "benchmarks" / name
        text = path.read_text() if path.exists() else ""
        missing += [
            (page, name, word) for word in arguments.split() if word[:2] == "--" != word and f'"{word}"' not in text
        ]
        missing += [(page, name, "")] * (not text)
    assert len(named) > 20 and not missing


def warnings_of_the_code() -> Iterator[tuple[str, str]]:
    """Where a warning is, and the first longer part of it that is the same each time."""
    for path in sorted([*(ROOT / "gact_fx").rglob("*.py"), *(ROOT / "passes").glob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") not in ("warning", "warn"):
                continue
            text = node.args[0]
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            fixed = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            fragments = [piece for part in fixed for piece in re.split(r"%[-+.0-9]*[a-z%]", part)]
            if fragments:
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                telling = next((piece for piece in fragments if len(piece) > 15), max(fragments, key=len))
                yield where, telling.strip(" ;:,.")


def test_every_warning_has_an_entry() -> None:
    page = " ".join((ROOT / "docs" / "warnings.md").read_text().split())
    # The page has the beginning of long ones.
    missing = [f"{where}: {text}" for where, text in warnings_of_the_code() if text[:45] not in page]
    assert not missing, "docs/warnings.md lacks these warnings:\n" + "\n".join(missing)


def test_every_public_name_is_in_the_reference() -> None:
    entries = set(re.findall(r"^::: (?:[\w.]+\.)?(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.M))
    public = {*gact_fx.__all__, *gact_fx.ops.__all__, *gact_fx.integrations.__all__} - {"ops"}
    assert not public - entries


def test_the_version_stands_in_one_place() -> None:
    # Python 3.10 has no tomllib.
    metadata = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in metadata and 'version = { attr = "gact_fx.__version__" }' in metadata
    assert f'"{gact_fx.__version__}"' not in metadata
    others = [path for path in ("setup.py", "CITATION.cff") if gact_fx.__version__ in (ROOT / path).read_text()]
    assert not others
    assert re.search(rf"^## {re.escape(gact_fx.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_levels_are_as_the_page_says() -> None:
    page = (ROOT / "docs" / "budget.md").read_text()
    for level, bits in (("L1, L1.1, L1.2", "4, 8, 2"), ("L2, L2.1, L2.2", "4, 3, 2"), ("L3", "4"), ("swap", "8")):
        assert f"| {level} | {bits} |" in page
        for name, number in zip(level.split(", "), bits.split(", "), strict=True):
            config = gact_fx.Config.from_level(name)
            assert config.budget_bits == float(number)
            assert config.adaptive == (name[:2] in ("L2", "L3")) and config.swap == (name in ("L3", "swap"))
