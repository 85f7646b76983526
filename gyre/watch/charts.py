"""Small SVG charts as text: lines, stacked spans, bars. Pure functions; colours are classes of the page's style.

Every chart has a title for screen readers and a viewBox, so that it fits any width. Values that are not finite are
left out. Texts are escaped here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 200
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart: points (x, y) in order of x; `look` is a class of the style."""

    name: str
    points: Sequence[tuple[float, float]]
    look: str
    is_step: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that lasted, in a row of a chart of spans."""

    row: int
    begin: float
    end: float
    look: str
    name: str


def line_chart(title: str, lines: Sequence[Line], *, x_name: str, low: float | None = None) -> str:
    """Lines over a common x; the y axis covers all values, and `low` if given."""
    kept = [(line, [point for point in line.points if all(map(math.isfinite, point))]) for line in lines]
    kept = [(line, points) for line, points in kept if points]
    if not kept:
        return f'<p class="none">{escape(title)}: nothing yet</p>'
    xs = [x for _, points in kept for x, _ in points]
    ys = [y for _, points in kept for _, y in points] + ([] if low is None else [low])
    frame = _Frame(x0=min(xs), x1=max(xs), y0=min(ys), y1=max(ys))
    parts = [_axes(frame, x_name)]
    for line, points in kept:
        kept_points = _thinned(points)  # before the corners of steps are added: a lost corner is a slope
        drawn = _stepped(kept_points, frame.x1) if line.is_step else kept_points
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in drawn)
        parts.append(f'<polyline class="line {line.look}" points="{path}"/>')
        if len(points) == 1:
            parts.append(f'<circle class="dot {line.look}" cx="{frame.x(drawn[0][0]):.1f}" '
                         f'cy="{frame.y(drawn[0][1]):.1f}" r="3"/>')  # fmt: skip
    names = "".join(f'<span class="key {line.look}">{escape(line.name)}</span>' for line, _ in kept)
    return _figure(title, names, _svg(title, HEIGHT, "".join(parts)))


def span_chart(title: str, rows: Sequence[str], spans: Sequence[Span], *, end: float, legend: Sequence[str]) -> str:
    """One row a name, a coloured span for what lasted; `legend` lists the looks."""
    height = TOP + 22 * len(rows) + BOTTOM
    frame = _Frame(x0=0.0, x1=end or 1.0, y0=0.0, y1=1.0)
    parts = [
        f'<text class="tick" x="{LEFT - 6}" y="{TOP + 22 * row + 14}" text-anchor="end">{escape(name)}</text>'
        for row, name in enumerate(rows)
    ]
    for span in spans:
        begin, stop = frame.x(span.begin), frame.x(max(span.begin, span.end))
        parts.append(
            f'<rect class="fill {span.look}" x="{begin:.2f}" y="{TOP + 22 * span.row}" '
            f'width="{max(0.4, stop - begin):.2f}" height="18"><title>{escape(span.name)}</title></rect>'
        )
    parts += [
        f'<text class="tick" x="{frame.x(x):.1f}" y="{height - 6}" text-anchor="middle">{_number(x)} s</text>'
        for x in _ticks(0.0, frame.x1, 5)
    ]
    names = "".join(f'<span class="key {look}">{escape(look)}</span>' for look in legend)
    return _figure(title, names, _svg(title, height, "".join(parts)))


def share_bars(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """For each row, parts of a whole as one bar: ((look, seconds), ...)."""
    parts = []
    for name, shares in rows:
        total = sum(seconds for _, seconds in shares) or 1.0
        pieces = "".join(
            f'<span class="piece {look}" style="width:{100 * seconds / total:.2f}%" '
            f'title="{escape(look)}: {seconds:.1f} s, {seconds / total:.0%}"></span>'
            for look, seconds in shares
            if seconds > 0
        )
        parts.append(
            f'<div class="share"><span class="who">{escape(name)}</span><span class="bar">{pieces}</span></div>'
        )
    return "".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """From values to places in the picture."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / ((self.x1 - self.x0) or 1.0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        span = (self.y1 - self.y0) or 1.0
        return HEIGHT - BOTTOM - (value - self.y0) / span * (HEIGHT - TOP - BOTTOM)


def _axes(frame: _Frame, x_name: str) -> str:
    parts = []
    for y in _ticks(frame.y0, frame.y1, 4):
        at = frame.y(y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_number(y)}</text>')
    parts += [
        f'<text class="tick" x="{frame.x(x):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{_number(x)}</text>'
        for x in _ticks(frame.x0, frame.x1, 6)
        if frame.x(x) < WIDTH - RIGHT - 44  # room for the axis's name
    ]
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(x_name)}</text>')
    return "".join(parts)


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from `low` to `high`, at most about `count`."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _number(value: float) -> str:
    if value and abs(value) < 1e-3:
        return f"{value:.0e}"
    return f"{value:.4g}"


def _stepped(points: Sequence[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    drawn: list[tuple[float, float]] = []
    for x, y in points:
        if drawn:
            drawn.append((x, drawn[-1][1]))
        drawn.append((x, y))
    return [*drawn, (end, drawn[-1][1])] if drawn else drawn


def _thinned(points: Sequence[tuple[float, float]], most: int = 1500) -> Sequence[tuple[float, float]]:
    """A page stays small whatever the run's length: every n-th point, the last always."""
    stride = -(-len(points) // most)
    return points if stride <= 1 else [*points[::stride], points[-1]]


def _svg(title: str, height: int, inside: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title, quote=True)}">{inside}</svg>'


def _figure(title: str, names: str, svg: str) -> str:
    return f'<figure><figcaption>{escape(title)} <span class="keys">{names}</span></figcaption>{svg}</figure>'
