"""Line charts as SVG text: no dependency, no script, readable in a browser and on paper."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f", "#475569", "#92400e")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 340, 70, 16, 14, 46


@dataclass(frozen=True)
class Line:
    """A named line through (x, y), with a band from `low` to `high` where these are given."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = field(default=())
    high: Sequence[float] = field(default=())


def chart(lines: Sequence[Line], x_title: str, y_title: str, *, log_x: bool = False, log_y: bool = False) -> str:
    """The lines in one frame, with ticks and a legend. Points that are not finite are left out; on a logarithmic axis
    so are those that are not above zero."""
    drawn = [(index, line, _points(line, log_x, log_y)) for index, line in enumerate(lines)]
    drawn = [each for each in drawn if each[2]]
    if not drawn:
        return ""
    values = [value for _, _, points in drawn for point in points for value in point[1:]]
    x = _Axis([point[0] for _, _, points in drawn for point in points], log_x, LEFT, WIDTH - RIGHT)
    y = _Axis(values, log_y, HEIGHT - BOTTOM, TOP)
    rows = math.ceil(len(drawn) / 3)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + 20 * rows}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">'
    ]
    for tick in x.ticks():
        at = x(tick)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#e5e7eb"/>')
        parts.append(_text(at, HEIGHT - BOTTOM + 16, _label(tick), "middle"))
    for tick in y.ticks():
        at = y(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e5e7eb"/>')
        parts.append(_text(LEFT - 6, at + 4, _label(tick), "end"))
    for index, line, points in drawn:
        color = COLORS[index % len(COLORS)]
        if line.low:
            edge = [(x(p[0]), y(p[2])) for p in points] + [(x(p[0]), y(p[3])) for p in reversed(points)]
            parts.append(f'<polygon points="{_path(edge)}" fill="{color}" opacity="0.15"/>')
        path = [(x(p[0]), y(p[1])) for p in points]
        parts.append(f'<polyline points="{_path(path)}" fill="none" stroke="{color}" stroke-width="2"/>')
        if len(path) <= 16:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{color}"/>' for a, b in path]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_title, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="14" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle:.0f})">'
        f"{html.escape(y_title)}</text>"
    )
    for place, (index, line, _) in enumerate(drawn):
        left, top = LEFT + 230 * (place % 3), HEIGHT + 12 + 20 * (place // 3)
        parts.append(f'<rect x="{left}" y="{top - 9}" width="14" height="4" fill="{COLORS[index % len(COLORS)]}"/>')
        parts.append(_text(left + 20, top - 3, line.name, "start"))
    return "\n".join([*parts, "</svg>"])


def _points(line: Line, log_x: bool, log_y: bool) -> list[tuple[float, ...]]:
    columns = (line.x, line.y, line.low or line.y, line.high or line.y)
    return [
        point
        for point in zip(*columns, strict=True)
        if all(map(math.isfinite, point)) and (not log_x or point[0] > 0) and (not log_y or min(point[1:]) > 0)
    ]


class _Axis:
    """Numbers to places between two edges of the frame."""

    def __init__(self, values: Sequence[float], log: bool, start: float, end: float):
        self.log, self.start, self.end = log, start, end
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
            return [2.0**power for power in range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1, step)]
        rough = (self.high - self.low) / 6
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        return [step * count for count in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _label(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in points)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#374151">{html.escape(text)}</text>'
