"""Draws the rooms that `tools/house.py` measures: boxes in layers, whoever imports above what is imported.

An arrow that follows from others is left out: where A imports B and B imports C, that A also imports C is not drawn.
Long arrows pass between the boxes of the layers they cross.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.house import Room

BOX_WIDTH, BOX_HEIGHT, LANE_WIDTH, LAYER_HEIGHT = 2.9, 1.42, 0.45, 2.25
"""Inches. A lane is the place of an arrow that crosses a layer."""
GAP = 0.3
JOB_CHARACTERS, JOB_LINES = 36, 4
SWEEPS = 24
INK, PALE = "#1f2933", "#52606d"
TINTS = ("#e8eef4", "#e3f0ec", "#f1ecdf", "#efe6f0", "#e5eaf6", "#f6e7e2", "#e9f1dd", "#eeeeee")
STROKES = ("#7b8794", "#3f8f7a", "#a98a3c", "#8d5a97", "#4a68b0", "#b8583c", "#6f9440", "#777777")


@dataclass(frozen=True)
class _Place:
    """A box, or the lane of an arrow through a layer."""

    name: str
    lane: bool
    width: float


def reduced(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The arrows that do not follow from others. Circles are kept as they are."""

    def reach(node: str, seen: set[str]) -> set[str]:
        for other in imports[node] - seen:
            seen.add(other)
            reach(other, seen)
        return seen

    beyond = {node: {other: reach(other, set()) for other in imports[node]} for node in imports}
    return {
        node: {other for other in imports[node] if not any(other in beyond[node][by] for by in imports[node] - {other})}
        for node in imports
    }


def layers_of(imports: Mapping[str, set[str]]) -> dict[str, int]:
    """Layer of each room, 0 at the bottom: above all that it imports, and close to whoever imports it."""
    level = dict.fromkeys(imports, 0)
    # As often as there are rooms: a circle would climb for ever.
    for _ in imports:
        level = {node: 1 + max((level[other] for other in imports[node]), default=-1) for node in imports}
    arrows = reduced(imports)
    users = {node: [other for other in imports if node in arrows[other]] for node in imports}
    for node in sorted(imports, key=level.__getitem__, reverse=True):
        if len(users[node]) >= max(len(arrows[node]), 1):
            level[node] = max(level[node], min(level[user] for user in users[node]) - 1)
    used = sorted(set(level.values()))
    return {node: used.index(level[node]) for node in imports}


def draw(rooms: Sequence[Room], target: Path) -> None:
    """Write the picture.

    Args:
        rooms: as measured.
        target: PNG file; its folder is made.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    imports = {room.name: set(room.imports) for room in rooms}
    level = layers_of(imports)
    rows, chains = _with_lanes(reduced(imports), level)
    x = _positions(rows, chains)
    right = max(x[place.name] + place.width / 2 for row in rows for place in row)
    top = LAYER_HEIGHT * (len(rows) - 1) + BOX_HEIGHT + 0.3
    figure, axes = pyplot.subplots(figsize=(right + 0.6, top + 0.75))
    axes.set(xlim=(-0.3, right + 0.3), ylim=(-0.75, top), aspect="equal")
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    y = {place.name: LAYER_HEIGHT * number + BOX_HEIGHT / 2 for number, row in enumerate(rows) for place in row}
    for chain in sorted(chains):
        _arrow(axes, chain, chains, x, y, STROKES[level[chain[0]] % len(STROKES)])
    for room in rooms:
        _box(axes, room, x[room.name], y[room.name], level[room.name] % len(TINTS))
    note = "An arrow leads from who imports to what is imported; arrows that follow from others are left out."
    axes.text(right / 2, -0.5, note, ha="center", va="center", fontsize=11, color=PALE)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=90, facecolor="white", metadata={"Software": None})
    pyplot.close(figure)


def _with_lanes(
    arrows: Mapping[str, set[str]], level: Mapping[str, int]
) -> tuple[list[list[_Place]], list[tuple[str, ...]]]:
    """(places of each layer, from the bottom; each arrow as the places it passes, from its tail)."""
    rows: list[list[_Place]] = [[] for _ in range(max(level.values()) + 1)]
    for node in sorted(level):
        rows[level[node]].append(_Place(node, False, BOX_WIDTH))
    chains = []
    for node in sorted(arrows):
        for other in sorted(arrows[node]):
            # Arrows to one room share their lane.
            lanes = [f"{other}@{number}" for number in range(level[node] - 1, level[other], -1)]
            for number, lane in zip(range(level[node] - 1, level[other], -1), lanes, strict=True):
                if lane not in {place.name for place in rows[number]}:
                    rows[number].append(_Place(lane, True, LANE_WIDTH))
            chains.append((node, *lanes, other))
    return rows, chains


def _positions(rows: list[list[_Place]], chains: list[tuple[str, ...]]) -> dict[str, float]:
    """Horizontal centre of every place; sorts the rows so that arrows cross seldom."""
    above: dict[str, set[str]] = {place.name: set() for row in rows for place in row}
    below: dict[str, set[str]] = {name: set() for name in above}
    for chain in chains:
        for upper, lower in zip(chain[:-1], chain[1:], strict=True):
            above[lower].add(upper)
            below[upper].add(lower)
    best: tuple[float, list[list[_Place]], dict[str, float]] | None = None
    x = _spread(rows, lambda row, place: float(rows[row].index(place)) * BOX_WIDTH)
    for sweep in range(SWEEPS):
        neighbours = below if sweep % 2 else above
        order = range(len(rows)) if sweep % 2 else range(len(rows) - 1, -1, -1)
        for number in order:
            wanted = {p.name: _mean([x[n] for n in neighbours[p.name]], x[p.name]) for p in rows[number]}
            rows[number].sort(key=lambda place: wanted[place.name])
            x |= _spread_row(rows[number], wanted)
        cost = 3.0 * _crossings(rows, below) + sum(abs(x[a] - x[b]) for a in below for b in below[a])
        if best is None or cost < best[0]:
            best = cost, [list(row) for row in rows], dict(x)
    assert best is not None
    rows[:] = best[1]
    x = best[2]
    for _ in range(SWEEPS):
        for row in rows:
            wanted = {p.name: _mean([x[n] for n in (*above[p.name], *below[p.name])], x[p.name]) for p in row}
            x |= _spread_row(row, wanted)
    left = min(x[place.name] - place.width / 2 for row in rows for place in row)
    return {name: value - left for name, value in x.items()}


def _spread(rows: list[list[_Place]], wanted: Callable[[int, _Place], float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for number, row in enumerate(rows):
        found |= _spread_row(row, {place.name: wanted(number, place) for place in row})
    return found


def _spread_row(row: list[_Place], wanted: Mapping[str, float]) -> dict[str, float]:
    """Near the wanted places, in the row's order and apart: the mean of what pushing right and pushing left give."""
    pushed_right, pushed_left = {}, {}
    edge = float("-inf")
    for place in row:
        pushed_right[place.name] = max(wanted[place.name], edge + place.width / 2)
        edge = pushed_right[place.name] + place.width / 2 + GAP
    edge = float("inf")
    for place in reversed(row):
        pushed_left[place.name] = min(wanted[place.name], edge - place.width / 2)
        edge = pushed_left[place.name] - place.width / 2 - GAP
    return {name: (pushed_right[name] + pushed_left[name]) / 2 for name in pushed_right}


def _crossings(rows: list[list[_Place]], below: Mapping[str, set[str]]) -> int:
    total = 0
    for lower, upper in zip(rows[:-1], rows[1:], strict=True):
        rank = {place.name: number for number, place in enumerate(lower)}
        ends = [(a, rank[name]) for a, place in enumerate(upper) for name in below[place.name]]
        total += sum(a < c and b > d or a > c and b < d for i, (a, b) in enumerate(ends) for c, d in ends[:i])
    return total


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _arrow(axes: Any, chain: tuple[str, ...], chains: list[tuple[str, ...]], x, y, colour: str) -> None:
    """One arrow; tails and heads are spread along the edges of their boxes."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Line

    tail = x[chain[0]] + _port(chain, chains, 0, 1, x)
    head = x[chain[-1]] + _port(chain, chains, -1, -2, x)
    points = [(tail, y[chain[0]] - BOX_HEIGHT / 2)]
    for lane in chain[1:-1]:
        points += [(x[lane], y[lane] + BOX_HEIGHT / 2), (x[lane], y[lane] - BOX_HEIGHT / 2)]
    points.append((head, y[chain[-1]] + BOX_HEIGHT / 2 + 0.02))
    vertices, codes = [points[0]], [Line.MOVETO]
    for number, ((x0, y0), (x1, y1)) in enumerate(zip(points[:-1], points[1:], strict=True)):
        if number % 2:
            vertices.append((x1, y1))
            codes.append(Line.LINETO)
        else:
            middle = (y0 + y1) / 2
            vertices += [(x0, middle), (x1, middle), (x1, y1)]
            codes += [Line.CURVE4] * 3
    style = {"arrowstyle": "-|>,head_length=5,head_width=2.6", "linewidth": 1.3, "color": colour, "alpha": 0.85}
    axes.add_patch(FancyArrowPatch(path=Line(vertices, codes), shrinkA=0, shrinkB=0, **style))


def _port(
    chain: tuple[str, ...], chains: list[tuple[str, ...]], end: int, next_to: int, x: Mapping[str, float]
) -> float:
    """Distance from the middle of the box at which a chain leaves (end 0) or arrives (end -1)."""
    neighbours = sorted({other[next_to] for other in chains if other[end] == chain[end]}, key=x.__getitem__)
    width = BOX_WIDTH * 0.78
    return width * ((neighbours.index(chain[next_to]) + 0.5) / len(neighbours) - 0.5)


def _box(axes: Any, room: Room, x: float, y: float, tint: int) -> None:
    from matplotlib.patches import FancyBboxPatch

    left, bottom = x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2
    axes.add_patch(
        FancyBboxPatch(
            (left + 0.06, bottom + 0.06), BOX_WIDTH - 0.12, BOX_HEIGHT - 0.12, boxstyle="round,pad=0.06",
            facecolor=TINTS[tint], edgecolor=STROKES[tint], linewidth=1.4, zorder=3,
        )
    )  # fmt: skip
    top = y + BOX_HEIGHT / 2
    axes.text(left + 0.12, top - 0.22, room.name, fontsize=13, weight="bold", color=INK, va="center", zorder=4)
    size = f"{room.files} files · {room.lines:,} lines" if room.files > 1 else f"{room.lines:,} lines"
    axes.text(left + BOX_WIDTH - 0.12, top - 0.23, size, fontsize=8, color=PALE, va="center", ha="right", zorder=4)
    job = textwrap.wrap(room.job.replace("`", ""), JOB_CHARACTERS, max_lines=JOB_LINES, placeholder=" …")
    axes.text(left + 0.12, top - 0.45, "\n".join(job), fontsize=10, color=INK, va="top", linespacing=1.3, zorder=4)
