"""A picture of a simulated run as SVG text: cells over time as coloured bars, the waterlevel below.

One string of plain SVG 1.1 without scripts or fonts of its own. The whole run or its first hours are drawn.
"""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from gyre.schedule.cells import CellState
from gyre.simulate.result import Result, Segment

COLOURS = {
    "rollout": "#4c9f70",
    "loading": "#b8d8c5",
    "switching": "#f2b134",
    "training": "#3b6fb6",
    "publishing": "#9db7dc",
}
KIND = {
    CellState.SERVING: "rollout",
    CellState.LOADING: "loading",
    CellState.DRAINING: "switching",
    CellState.RELEASED: "switching",
    CellState.JOINING: "switching",
    CellState.TRAINING: "training",
    CellState.PUBLISHING: "publishing",
    CellState.LOST: "switching",
}
WIDTH, LEFT, TOP, BAR, GAP, LEVEL_HEIGHT = 1000, 70, 56, 22, 6, 140


def draw(result: Result, *, title: str, capacity: int, num_cells: int, hours: float | None = None) -> str:
    """SVG text; `hours` limits the time axis. `capacity` is C_e, drawn as the steps that free a cell."""
    end_s = min(result.seconds, hours * 3600 if hours else result.seconds) or 1.0
    scale = (WIDTH - LEFT - 20) / end_s
    bars_end = TOP + num_cells * (BAR + GAP)
    height = bars_end + 40 + LEVEL_HEIGHT + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15" font-weight="bold">{escape(title)}</text>',
        *_legend(),
        *_bars(result.segments, scale, end_s, num_cells),
        *_levels(result.levels, scale, end_s, bars_end + 40, capacity, num_cells),
        *_axis(end_s, scale, bars_end + 40 + LEVEL_HEIGHT, result.step_ends_s),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend() -> list[str]:
    parts, x = [], LEFT
    for name, colour in COLOURS.items():
        parts.append(f'<rect x="{x}" y="30" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{x + 19}" y="42">{name}</text>')
        x += 110
    parts.append(f'<line x1="{x}" y1="30" x2="{x}" y2="44" stroke="#c0392b" stroke-dasharray="3 2"/>')
    parts.append(f'<text x="{x + 8}" y="42">step published</text>')
    return parts


def _bars(segments: Sequence[Segment], scale: float, end_s: float, num_cells: int) -> list[str]:
    parts = []
    for cell in range(num_cells):
        y = TOP + cell * (BAR + GAP)
        name = "core" if cell == 0 else f"cell {cell}"
        parts.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{name}</text>')
        # Neighbours of one kind are one bar; what is thinner than a hair keeps one.
        merged: list[tuple[str, float, float]] = []
        for one in segments:
            if one.cell != cell or one.begin_s >= end_s:
                continue
            kind = KIND[one.state]
            if merged and merged[-1][0] == kind:
                merged[-1] = (kind, merged[-1][1], one.end_s)
            else:
                merged.append((kind, one.begin_s, one.end_s))
        for kind, begin, end in merged:
            width = max((min(end, end_s) - begin) * scale, 0.4)
            parts.append(
                f'<rect x="{LEFT + begin * scale:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" '
                f'fill="{COLOURS[kind]}"/>'
            )
    return parts


def _levels(
    levels: Sequence[tuple[float, int]], scale: float, end_s: float, y: int, capacity: int, num_cells: int
) -> list[str]:
    top = max([level for _, level in levels] + [capacity * num_cells])
    high = LEVEL_HEIGHT / top
    parts = []
    for cell in range(num_cells + 1):
        line = y + LEVEL_HEIGHT - cell * capacity * high
        parts.append(f'<line x1="{LEFT}" y1="{line:.1f}" x2="{WIDTH - 20}" y2="{line:.1f}" stroke="#dddddd"/>')
        if cell in (0, num_cells):
            label = f"{cell * capacity}"
            parts.append(f'<text x="{LEFT - 8}" y="{line + 4:.1f}" text-anchor="end">{label}</text>')
    points, last_x, height = [], -1.0, float(y + LEVEL_HEIGHT)
    for at, level in levels:
        if at > end_s:
            break
        x = LEFT + at * scale
        if x - last_x >= 0.5:
            points.append(f"{x:.1f},{height:.1f}")
            last_x = x
            height = y + LEVEL_HEIGHT - level * high
            points.append(f"{x:.1f},{height:.1f}")
        else:
            # Thinner than a hair: the last of them counts.
            height = y + LEVEL_HEIGHT - level * high
            points[-1] = f"{last_x:.1f},{height:.1f}"
        height = y + LEVEL_HEIGHT - level * high
    parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="#333333"/>')
    parts.append(f'<text x="{LEFT}" y="{y - 8}">waterlevel: unfinished rollouts (a grey line a cell)</text>')
    return parts


def _axis(end_s: float, scale: float, y: int, step_ends_s: Sequence[float]) -> list[str]:
    hours = end_s / 3600
    unit, name, size = (hours, "hours", 3600.0) if hours >= 2 else (end_s / 60, "minutes", 60.0)
    if unit < 2:
        unit, name, size = end_s, "seconds", 1.0
    tick = next(one for one in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if unit / one <= 12)
    parts = [f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - 20}" y2="{y}" stroke="black"/>']
    for index in range(int(unit / tick) + 1):
        x = LEFT + index * tick * size * scale
        parts.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 5}" stroke="black"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 19}" text-anchor="middle">{index * tick}</text>')
    parts.append(f'<text x="{WIDTH - 20}" y="{y + 36}" text-anchor="end">{name}</text>')
    for end in step_ends_s:
        if end <= end_s:
            x = LEFT + end * scale
            parts.append(
                f'<line x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{y}" stroke="#c0392b" '
                f'stroke-width="0.7" stroke-dasharray="3 2"/>'
            )
    return parts
