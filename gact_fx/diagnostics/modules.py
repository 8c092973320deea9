"""Rows by module: repeated blocks become one line, and small modules are folded into the one around them."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gact_fx.diagnostics.report_rows import Row, average_bits, noise_shares

MOST_LINES = 12
# Modules that take less than this share of all share a line.
SMALL = 1e-3
OUTSIDE = "(outside of modules)"
EAGER = "(eager PyTorch between graphs)"
OTHERS = "(other modules)"
STAR = "*"
Path = tuple[str, ...]


@dataclass(frozen=True)
class ModuleLine:
    """What the tensors of a module, and of the modules in it, take in bytes; ``blocks``: how many its name stands for.

    ``bits`` per compressed element is None where nothing has codes; ``noise`` is the share of the variance that all
    codes add, None where that is not known.
    """

    name: str
    blocks: int
    bytes_before: int
    bytes_after: int
    bits: float | None
    noise: float | None

    @property
    def label(self) -> str:
        return label(self.name, self.blocks)


def label(name: str, blocks: int) -> str:
    """A module's name, with how many repeated blocks it stands for."""
    return f"{name}  ({blocks}x)" if blocks > 1 else name


def module_of(row: Row) -> Path:
    """The parts of a row's module, or what takes its place."""
    if row.graph is None:
        return (EAGER,)
    return tuple(row.module.split(".")) if row.module else (OUTSIDE,)


def by_module(rows: Sequence[Row], most: int = MOST_LINES) -> list[ModuleLine]:
    """At most ``most`` lines, in the order in which forward comes to the modules."""
    weights: dict[Path, int] = defaultdict(int)
    for row in rows:
        if row.bytes_before or row.bytes_after:
            weights[module_of(row)] += max(row.bytes_before, row.bytes_after)
    lines = fold(weights, most)
    found: dict[Path, list[tuple[Row, float | None]]] = {}
    for row, share in zip(rows, noise_shares(rows), strict=True):
        if module_of(row) in lines:
            found.setdefault(lines[module_of(row)], []).append((row, share))
    # All others come last.
    return [_line(line, found[line]) for line in sorted(found, key=lambda line: not line)]


def fold(weights: Mapping[Path, int], most: int) -> dict[Path, Path]:
    """The line that every module belongs to: itself, or where there are more than ``most``, a module around it.

    Where they are many, repeated blocks are one. The heaviest module is then split into those in it, again and again,
    as long as there is room for all of them.
    """
    if len(weights) <= most:
        small = {path for path, weight in weights.items() if weight < SMALL * sum(weights.values())}
        return {path: () if path in small and len(small) > 1 else path for path in weights}
    stars = starred(weights)
    total: dict[Path, int] = defaultdict(int)
    within: dict[Path, dict[Path, None]] = defaultdict(dict)
    for path, weight in weights.items():
        for depth in range(len(path) + 1):
            total[stars[path][:depth]] += weight
            if depth:
                within[stars[path][: depth - 1]][stars[path][:depth]] = None
    # What takes next to nothing is left for the line of all others.
    for path, inner in list(within.items()):
        within[path] = {module: None for module in inner if total[module] >= SMALL * total[()]}
    lines: set[Path] = {()}
    own = set(stars.values())
    while True:
        open_lines = [path for path in lines if path in within and not lines.issuperset(within[path])]
        for path in sorted(open_lines, key=lambda path: (-total[path], path)):
            split = (lines | within[path].keys()) - ({path} - own)
            if len(split) <= most:
                lines = split
                break
        else:
            break
    if lines == {()}:
        # More than there is room for at once.
        lines |= set(sorted(within[()], key=lambda path: -total[path])[: most - 1])
    return {path: _innermost(stars[path], lines | {()}) for path in weights}


def starred(paths: Collection[Path]) -> dict[Path, Path]:
    """Every path with stars for the numbers of repeated blocks: numbered neighbours that have modules in them."""
    children: dict[Path, set[str]] = defaultdict(set)
    for path in paths:
        for depth, part in enumerate(path):
            children[path[:depth]].add(part)
    repeated = set[Path]()
    for owner, parts in list(children.items()):
        numbered = [(*owner, part) for part in parts if part.isdigit()]
        if len(numbered) > 1 and any(path in children for path in numbered):
            repeated.update(numbered)
    return {
        path: tuple(STAR if path[: depth + 1] in repeated else part for depth, part in enumerate(path))
        for path in paths
    }


def blocks(line: Path, paths: Collection[Path]) -> int:
    """How many repeated blocks ``line`` stands for: of its ``paths``, those that differ up to its last star."""
    if STAR not in line:
        return 1
    end = len(line) - line[::-1].index(STAR)
    return len({path[:end] for path in paths})


def _innermost(path: Path, lines: Collection[Path]) -> Path:
    return next(path[:depth] for depth in range(len(path), -1, -1) if path[:depth] in lines)


def _line(line: Path, several: Sequence[tuple[Row, float | None]]) -> ModuleLine:
    rows = [row for row, _ in several]
    shares = [share for _, share in several if share is not None]
    return ModuleLine(
        ".".join(line) or OTHERS,
        blocks(line, {module_of(row) for row in rows}),
        sum(row.bytes_before for row in rows),
        sum(row.bytes_after for row in rows),
        average_bits(rows),
        sum(shares) if shares else None,
    )
