"""Charts as inline SVG: areas over time, and points in a plane. Colours are those of Okabe and Ito."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#7f7f7f")
WIDTH, HEIGHT = 410, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 24, 12, 40
Scale = Callable[[float], float]


@dataclass(frozen=True)
class Point:
    """One point, with the text that a pointer over it shows; ``colour`` is a number in `COLOURS`."""

    x: float
    y: float
    text: str
    colour: int = 0


@dataclass(frozen=True)
class Axis:
    """What an axis shows, whether by powers of ten, and which values have a mark with a text; none: found by itself."""

    title: str
    is_log: bool = False
    marks: tuple[tuple[float, str], ...] = ()


def area_chart(
    series: Sequence[Sequence[float]], highest: float, x: Axis, y: Axis, *, division: float, label: str
) -> str:
    """``series`` of equally many values on top of each other, up to ``highest``; a line at the share ``division``."""
    count = max(map(len, series), default=0)
    across, up = _scale(0, max(count, 1), LEFT, WIDTH - RIGHT), _scale(0, highest, HEIGHT - BOTTOM, TOP)
    parts = [_y_axis(up, _ticks(0, highest), y)]
    below = [0.0] * count
    for colour, values in enumerate(series):
        above = [a + b for a, b in zip(below, values, strict=True)]
        # Steps: what is live does not change between two operators.
        top = [(i + side, level) for i, level in enumerate(above) for side in (0, 1)]
        bottom = [(i + side, level) for i, level in enumerate(below) for side in (0, 1)]
        path = " ".join(f"{across(i):.1f},{up(level):.1f}" for i, level in [*top, *reversed(bottom)])
        parts.append(f'<polygon points="{path}" fill="{COLOURS[colour % len(COLOURS)]}"/>')
        below = above
    at = across(division * count)
    parts.append(f'<line class="division" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}"/>')
    parts.append(_text(at - 4, TOP + 9, "forward", "end") + _text(at + 4, TOP + 9, "backward", "start"))
    parts.append(_x_title(x))
    return _svg(parts, label)


def scatter(points: Sequence[Point], x: Axis, y: Axis, *, label: str) -> str:
    """A circle for each of ``points``; on a logarithmic axis those that are not positive are left out."""
    shown = [p for p in points if (p.x > 0 or not x.is_log) and (p.y > 0 or not y.is_log)]
    if not shown:
        return ""
    x_range, y_range = _range([p.x for p in shown], x), _range([p.y for p in shown], y)
    across = _scale(*x_range, LEFT + 6, WIDTH - RIGHT - 6, is_log=x.is_log)
    up = _scale(*y_range, HEIGHT - BOTTOM - 6, TOP + 6, is_log=y.is_log)
    parts = [_y_axis(up, _marks(y_range, y), y)]
    for value, text in _marks(x_range, x):
        parts.append(
            f'<line class="grid" x1="{across(value):.1f}" y1="{TOP}" x2="{across(value):.1f}" y2="{HEIGHT - BOTTOM}"/>'
        )
        parts.append(_text(across(value), HEIGHT - BOTTOM + 14, text, "middle"))
    parts += [
        f'<circle cx="{across(p.x):.1f}" cy="{up(p.y):.1f}" r="4" fill="{COLOURS[p.colour % len(COLOURS)]}">'
        f"<title>{escape(p.text)}</title></circle>"
        for p in shown
    ]
    parts.append(_x_title(x))
    return _svg(parts, label)


def _svg(parts: Sequence[str], label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _x_title(axis: Axis) -> str:
    return _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, axis.title, "middle")


def _y_axis(up: Scale, marks: Sequence[tuple[float, str]], axis: Axis) -> str:
    parts = []
    for value, text in marks:
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{up(value):.1f}" x2="{WIDTH - RIGHT}" y2="{up(value):.1f}"/>')
        parts.append(_text(LEFT - 5, up(value) + 4, text, "end"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(_text(12, middle, axis.title, "middle", f' transform="rotate(-90 12 {middle:.0f})"'))
    return "".join(parts)


def _scale(low: float, high: float, begin: float, end: float, *, is_log: bool = False) -> Scale:
    """What places the values from ``low`` to ``high`` between two pixels."""
    if is_log:
        inner = _scale(math.log10(low), math.log10(high), begin, end)
        return lambda value: inner(math.log10(value))
    return lambda value: begin + (value - low) / ((high - low) or 1.0) * (end - begin)


def _range(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    """From the least to the largest value; on a logarithmic axis to the powers of ten around them."""
    low, high = min(values), max(values)
    if not axis.is_log:
        return min(low, 0.0), high or 1.0
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return 10.0**first, 10.0 ** max(last, first + 1)


def _marks(limits: tuple[float, float], axis: Axis) -> list[tuple[float, str]]:
    low, high = limits
    if not axis.is_log:
        return [mark for mark in axis.marks if low <= mark[0] <= high] or _ticks(low, high)
    found = [(value, text) for value, text in axis.marks if low <= value <= high]
    if found:
        return found[:: (len(found) + 4) // 5]
    first, last = round(math.log10(low)), round(math.log10(high))
    return [(10.0**power, f"1e{power}") for power in range(first, last + 1, max((last - first + 4) // 5, 1))]


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Four to eight round values."""
    width = (high - low) or 1.0
    step = 10.0 ** math.floor(math.log10(width / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if width / (step * factor) <= 8)
    first, last = math.ceil(low / step), math.floor(high / step)
    digits = max(0, -math.floor(math.log10(step)))
    return [(i * step, f"{i * step:.{digits}f}") for i in range(first, last + 1)]
