"""The graphs before and after each pass: packed, and unpacked by the browser when they are opened."""

import base64
import difflib
import gzip
from collections.abc import Iterator, Sequence
from html import escape

from gact_fx.passes.pipeline import Stage


class Texts:
    """Long texts of a page, each packed once; `packed` is what the page needs to show them."""

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}

    def details(self, title: str, text: str) -> str:
        """What opens to ``text``."""
        key = self._keys.setdefault(text, f"text{len(self._keys)}")
        return f'<details class="text" data-key="{key}"><summary>{escape(title)}</summary><pre></pre></details>'

    def packed(self) -> str:
        """The texts, gzip in base64."""
        return "".join(
            f'<script type="text/plain" id="{key}">{_packed(text)}</script>' for text, key in self._keys.items()
        )


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def graph_sections(graphs: Sequence[Sequence[Stage]], texts: Texts) -> str:
    """For every graph its passes, and for each that edits the graphs, what it changed and the text before and after."""
    return "".join(
        f"<details><summary>graph {index}: {len(stages)} passes</summary>{''.join(_stages(stages, texts))}</details>"
        for index, stages in enumerate(graphs)
    )


def _stages(stages: Sequence[Stage], texts: Texts) -> Iterator[str]:
    for number, stage in enumerate(stages, 1):
        about = f"{number}. <b>{escape(stage.name)}</b> <small>{1e3 * stage.seconds:.1f} ms</small>"
        before, after = stage.before or (), stage.after or ()
        if not before and not after:
            yield f"<p>{about}: looks at the graphs and leaves them as they are</p>"
        elif before == after:
            yield f"<p>{about}: found nothing to change</p>"
        else:
            yield f"<p>{about}</p>{''.join(_texts(before, after, texts))}"


def _texts(before: Sequence[str], after: Sequence[str], texts: Texts) -> Iterator[str]:
    names = {1: ("joint graph",), 2: ("forward", "backward")}
    if len(before) == len(after):
        for name, old, new in zip(names[len(before)], before, after, strict=True):
            if old != new:
                changes = difflib.unified_diff(old.splitlines(), new.splitlines(), "before", "after", lineterm="", n=2)
                yield texts.details(f"{name}: what changed", "\n".join(changes))
    for when, found in (("before", before), ("after", after)):
        for name, text in zip(names.get(len(found), ()), found, strict=True):
            yield texts.details(f"{name}, {when}", text)
