"""Small plots as SVG text: axes with round ticks, lines, dots, intervals. Colours come from the page's CSS classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
_W, _H, _LEFT, _RIGHT, _TOP, _BOTTOM = 720.0, 260.0, 58.0, 14.0, 12.0, 42.0
MAX_DOTS = 4000
_ALONE = ("svg{background:#fff;font:12px sans-serif;fill:#333}.grid{stroke:#e4e4e4}.line{fill:none;stroke:#1f6feb;"
          "stroke-opacity:.4;stroke-width:2}.dots{fill:#1f6feb}.label{font-weight:600}.limit{stroke:#c33}")


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from ``low`` to ``high``; a logarithmic one wants both positive."""

    label: str
    low: float
    high: float
    log: bool = False

    @classmethod
    def over(cls, label: str, values: Sequence[float], *, log: bool = False, zero: bool = False) -> Axis:
        """Make an axis that holds all values; a log axis leaves out what is not positive."""
        there = [v for v in values if v > 0] if log else list(values)
        low, high = min(there, default=1.0), max(there, default=2.0)
        if log:
            return cls(label, low / 1.15, max(high, low * 1.5) * 1.15, True)
        low = min(low, 0.0) if zero else low
        return cls(label, low, high + (high - low or 1.0) * 0.05)

    def place(self, value: float) -> float:
        """Return where a value lies, 0 to 1, kept inside."""
        if self.log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Return four to ten round values inside."""
        if self.log and self.high / self.low > 4:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1,) if len(decades) > 5 else (1, 2, 5)
            candidates = [m * 10.0**d for d in decades for m in steps]
        else:
            step = _round_step((self.high - self.low) / 6)
            first = math.ceil(self.low / step)
            candidates = [step * i for i in range(first, first + 12)]
        return [v for v in candidates if self.low <= v <= self.high]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)


class Plot:
    """One plot; add marks, then take its text."""

    def __init__(self, x: Axis, y: Axis, alt: str) -> None:
        self._x, self._y, self._alt = x, y, alt
        self._marks: list[str] = []

    def _at(self, point: Point) -> tuple[float, float]:
        width, height = _W - _LEFT - _RIGHT, _H - _TOP - _BOTTOM
        return _LEFT + self._x.place(point[0]) * width, _TOP + (1 - self._y.place(point[1])) * height

    def line(self, points: Sequence[Point], css: str) -> None:
        """Join points, in the order given."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self._at, points))
        self._marks.append(f'<polyline class="line {css}" points="{path}"/>')

    def dots(self, points: Sequence[Point], css: str, radius: float = 2.0) -> None:
        """Draw each point; of very many, every n-th and always the highest."""
        step = max(1, math.ceil(len(points) / MAX_DOTS))
        shown = {*points[::step], *sorted(points, key=lambda p: -p[1])[:100]} if step > 1 else points
        marks = (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for x, y in map(self._at, shown))
        self._marks.append(f'<g class="dots {css}">{"".join(marks)}</g>')

    def level(self, value: float, label: str, *, vertical: bool = False) -> None:
        """Draw a limit across the plot."""
        axis = self._x if vertical else self._y
        if not axis.low <= value <= axis.high:
            return
        if vertical:
            x, _ = self._at((value, self._y.low))
            ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_H - _BOTTOM}"'
            text = f'x="{x - 4:.1f}" y="{_H - _BOTTOM - 8}" text-anchor="end"'
        else:
            _, y = self._at((self._x.low, value))
            ends = f'x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
            text = f'x="{_W - _RIGHT - 4}" y="{y - 4:.1f}" text-anchor="end"'
        self._marks.append(f'<line class="limit" {ends}/><text class="limit" {text}>{escape(label)}</text>')

    def label(self, point: Point, text: str) -> None:
        """Write beside a point, on the side that has room."""
        x, y = self._at(point)
        right = x < _LEFT + 0.75 * (_W - _LEFT - _RIGHT)
        place = f'x="{x + (9 if right else -9):.1f}" y="{y - 8:.1f}" text-anchor="{"start" if right else "end"}"'
        self._marks.append(f'<text class="label" {place}>{escape(text)}</text>')

    def file(self) -> str:
        """Return the plot as a file that stands alone, with colours of its own."""
        return self.svg().replace("xmlns=", f'width="{_W:.0f}" height="{_H:.0f}" xmlns=', 1).replace(
            ">", f"><style>{_ALONE}</style>", 1) + "\n"

    def svg(self) -> str:
        """Return the SVG element."""
        return (f'<svg viewBox="0 0 {_W:.0f} {_H:.0f}" role="img" aria-label="{escape(self._alt)}" '
                f'xmlns="http://www.w3.org/2000/svg">{self._axes()}{"".join(self._marks)}</svg>')

    def _axes(self) -> str:
        parts = []
        bottom = _H - _BOTTOM
        for value in self._x.ticks():
            x, _ = self._at((value, self._y.low))
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>'
                         f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
        for value in self._y.ticks():
            _, y = self._at((self._x.low, value))
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
                         f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
        middle = _TOP + (bottom - _TOP) / 2
        parts.append(f'<text class="name" x="{(_LEFT + _W - _RIGHT) / 2}" y="{_H - 8}" text-anchor="middle">'
                     f'{escape(self._x.label)}</text><text class="name" transform="translate(14 {middle}) rotate(-90)" '
                     f'text-anchor="middle">{escape(self._y.label)}</text>')
        return "".join(parts)


def intervals(rows: Sequence[tuple[str, float, float, float, str]], label: str) -> str:
    """Return a plot of ratios with their intervals about 1: rows of name, low, middle, high and CSS class."""
    ends = [v for _, low, _, high, _ in rows for v in (low, high)]
    axis = Axis.over(label, [*ends, 0.9, 1.1], log=True)
    height, left, width = 34.0 * len(rows) + 44, 130.0, _W - 130 - 90

    def x(value: float) -> float:
        return left + axis.place(value) * width

    parts = [f'<line class="limit" x1="{x(1):.1f}" x2="{x(1):.1f}" y1="4" y2="{height - 36}"/>']
    for value in axis.ticks():
        parts.append(f'<text x="{x(value):.1f}" y="{height - 20}" text-anchor="middle">{value:g}</text>')
    for i, (name, low, middle, high, css) in enumerate(rows):
        y = 20 + 34.0 * i
        parts.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{escape(name)}</text><g class="{css}">'
                     f'<line class="interval" x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{y}" y2="{y}"/>'
                     f'<circle cx="{x(middle):.1f}" cy="{y}" r="5"/></g>'
                     f'<text x="{_W - 82}" y="{y + 4}">× {middle:.3f}</text>')
    parts.append(f'<text x="{left + width / 2}" y="{height - 3}" text-anchor="middle">{escape(label)}</text>')
    return (f'<svg viewBox="0 0 {_W:.0f} {height:.0f}" role="img" aria-label="{escape(label)}" '
            f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>')
