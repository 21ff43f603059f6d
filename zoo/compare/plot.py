"""Line charts as SVG text: no dependency, no script, readable in a browser and on paper."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f", "#475569", "#92400e")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 340, 70, 16, 14, 46
LETTER = 7.0  # the width of one, about
LETTERS = int((WIDTH - LEFT - 40) / LETTER)


@dataclass(frozen=True)
class Line:
    """A named line through (x, y), with a band from `low` to `high` where these are given. Its colour is number
    `color`, by default the line's place; the legend names each colour once."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = field(default=())
    high: Sequence[float] = field(default=())
    color: int = -1
    dashed: bool = False


def chart(
    lines: Sequence[Line],
    x_title: str,
    y_title: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    whole_x: bool = False,
    shown_y: Sequence[float] = (),
) -> str:
    """The lines in one frame, with ticks and a legend. Points that are not finite are left out; on a logarithmic axis
    so are those that are not above zero. `whole_x`: ticks at whole numbers only; `shown_y`: what the frame holds
    beside the lines."""
    drawn = [(index, line, _points(line, log_x, log_y)) for index, line in enumerate(lines)]
    drawn = [each for each in drawn if each[2]]
    if not drawn:
        return ""
    values = [value for _, _, points in drawn for point in points for value in point[1:]]
    x = _Axis([point[0] for _, _, points in drawn for point in points], log_x, LEFT, WIDTH - RIGHT, whole_x)
    y = _Axis([*values, *shown_y], log_y, HEIGHT - BOTTOM, TOP)
    names = {_color(index, line): line.name for index, line, _ in reversed(drawn) if line.name}
    legend = sorted(names.items(), key=lambda item: COLORS.index(item[0]))
    columns = _columns(list(names.values()))
    rows = math.ceil(len(legend) / columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + 20 * rows}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">'
    ]
    for tick in x.ticks():
        at = x(tick)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#e5e7eb"/>')
        parts.append(_text(min(at, WIDTH - RIGHT - 6), HEIGHT - BOTTOM + 16, x.label(tick), "middle"))
    for tick in y.ticks():
        at = y(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e5e7eb"/>')
        parts.append(_text(LEFT - 6, at + 4, y.label(tick), "end"))
    for index, line, points in drawn:
        color, dashes = _color(index, line), ' stroke-dasharray="7 4"' if line.dashed else ""
        if line.low:
            edge = [(x(p[0]), y(p[2])) for p in points] + [(x(p[0]), y(p[3])) for p in reversed(points)]
            parts.append(f'<polygon points="{_path(edge)}" fill="{color}" opacity="0.15"/>')
        path = [(x(p[0]), y(p[1])) for p in points]
        parts.append(f'<polyline points="{_path(path)}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>')
        if len(path) <= 16:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{color}"/>' for a, b in path]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_title, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="14" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle:.0f})">'
        f"{html.escape(y_title)}</text>"
    )
    for place, (color, name) in enumerate(legend):
        left, top = LEFT + (WIDTH - LEFT) / columns * (place % columns), HEIGHT + 12 + 20 * (place // columns)
        parts.append(f'<rect x="{left:.0f}" y="{top - 9}" width="14" height="4" fill="{color}"/>')
        parts.append(_text(left + 20, top - 3, _shortened(name, LETTERS), "start"))
    return "\n".join([*parts, "</svg>"])


def _color(index: int, line: Line) -> str:
    return COLORS[(index if line.color < 0 else line.color) % len(COLORS)]


def _columns(names: Sequence[str]) -> int:
    """How many columns of a legend its longest name leaves room for: at most three."""
    longest = LETTER * max((len(name) for name in names), default=1) + 40
    return max(1, min(3, int((WIDTH - LEFT) / longest)))


def _shortened(text: str, letters: int) -> str:
    """At most so many letters, the middle ones left out: names differ at their ends."""
    if len(text) <= letters:
        return text
    end = (letters - 1) // 2
    return f"{text[: letters - 1 - end]}…{text[-end:]}"


def _points(line: Line, log_x: bool, log_y: bool) -> list[tuple[float, ...]]:
    columns = (line.x, line.y, line.low or line.y, line.high or line.y)
    return [
        point
        for point in zip(*columns, strict=True)
        if all(map(math.isfinite, point)) and (not log_x or point[0] > 0) and (not log_y or min(point[1:]) > 0)
    ]


class _Axis:
    """Numbers to places between two edges of the frame."""

    def __init__(self, values: Sequence[float], log: bool, start: float, end: float, whole: bool = False):
        self.log, self.start, self.end, self.whole = log, start, end, whole
        low, high = min(values), max(values)
        if low == high:
            low, high = low - abs(low or 1) / 10, high + abs(high or 1) / 10
        margin = 0.0 if log else 0.03 * (high - low)
        self.low, self.high = low - margin, high + margin

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.log2(self.low), math.log2(self.high)
            step = max(1, math.ceil((last - first) / 8))
            found = [2.0**power for power in range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1, step)]
            return found if len(found) > 1 else [self.low, self.high]
        rough = max(1.0 if self.whole else 0.0, (self.high - self.low) / 6)
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        return [step * count for count in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]

    def label(self, value: float) -> str:
        """Of powers of two in their own units."""
        for power, unit in ((3, "G"), (2, "M"), (1, "k")):
            size = (1024 if self.log else 1000) ** power
            if abs(value) >= (10_000 if unit == "k" and not self.log else size):
                return f"{value / size:.4g}{unit}{'i' if self.log else ''}"
        return f"{value:.4g}"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in points)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#374151">{html.escape(text)}</text>'
