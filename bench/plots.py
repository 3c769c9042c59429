"""Plots as SVG texts, with nothing but the standard library; readable in light and dark.

Colours are classes that `prefers-color-scheme` changes; the background stays the page's. Each plot
has a title and a description for who cannot see it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 760
LEFT = 210
RIGHT = 120
TOP = 44
BAR = 18
GAP = 8
PLOT = WIDTH - LEFT - RIGHT
CHART_HEIGHT = 260

LIGHT = {"text": "#1f2328", "line": "#d0d7de", "floor": "#6e7781", "ours": "#1f6feb"}
LIGHT |= {"py": "#bc4c00", "other": "#8250df", "more": "#1a7f37"}
DARK = {"text": "#e6edf3", "line": "#3d444d", "floor": "#8b949e", "ours": "#58a6ff"}
DARK |= {"py": "#f0883e", "other": "#bc8cff", "more": "#3fb950"}


def coloured(colours: Mapping[str, str]) -> str:
    """Class rules: `fill-NAME` and `line-NAME`."""
    return " ".join(
        f".fill-{name} {{ fill: {colour} }} .line-{name} {{ stroke: {colour} }}"
        for name, colour in colours.items()
    )


STYLE = f"""
svg {{ font: 13px system-ui, sans-serif }} .title {{ font-weight: 600; font-size: 15px }}
.end {{ text-anchor: end }} .middle {{ text-anchor: middle }} path {{ fill: none }}
.dashed {{ stroke-dasharray: 6 4; stroke-width: 2 }} .curve {{ stroke-width: 2.5 }}
{coloured(LIGHT)}
@media (prefers-color-scheme: dark) {{ {coloured(DARK)} }}
"""


@dataclass(frozen=True)
class Bar:
    """One bar, and its range over the rounds."""

    label: str
    value: float
    colour: str
    low: float | None = None
    high: float | None = None
    note: str = ""
    """Beside the value."""


def rounded(value: float) -> str:
    """A value with three digits that mean something."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def label(x: float, y: float, what: str, place: str = "") -> str:
    """A text; `place` is the class that aligns it."""
    classes = f"{place} fill-text".strip()
    return f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}">{escape(what)}</text>'


def frame(height: float, title: str, told: str, body: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}">'
    )
    parts = [head, f"<title>{escape(title)}</title>", f"<desc>{escape(told)}</desc>"]
    parts += [
        f"<style>{STYLE}</style>",
        label(8, 22, title, "title"),
    ]
    return "\n".join([*parts, *body, "</svg>", ""])


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Horizontal bars from 0, one under the other, with a thin line for the range."""
    top = max((row.high or row.value for row in rows), default=1) or 1
    body = []
    y = TOP
    for row in rows:
        end = LEFT + PLOT * row.value / top
        middle = y + BAR / 2
        body.append(label(LEFT - 8, middle + 5, row.label, "end"))
        body.append(
            f'<rect x="{LEFT}" y="{y}" width="{max(end - LEFT, 1):.1f}" height="{BAR}" '
            f'rx="2" class="fill-{row.colour}"/>'
        )
        last = end
        if row.low is not None and row.high is not None:
            x1, x2 = (LEFT + PLOT * value / top for value in (row.low, row.high))
            ends = f"m0 -4v8M{x1:.1f} {middle - 4}v8"
            body.append(f'<path class="line-text" d="M{x1:.1f} {middle}H{x2:.1f}{ends}"/>')
            last = max(end, x2)
        value = f"{rounded(row.value)} {row.note}".strip()
        body.append(label(last + 6, middle + 5, value))
        y += BAR + GAP
    body.append(f'<path class="line-line" d="M{LEFT} {TOP - 6}V{y}"/>')
    told = "; ".join(f"{row.label}: {rounded(row.value)} {row.note}".strip() for row in rows)
    return frame(y + 8, title, told, body)


def curves(
    title: str,
    across: str,
    series: Mapping[str, tuple[str, Sequence[tuple[float, float]]]],
    level: tuple[str, float] | None = None,
) -> str:
    """Lines over a logarithmic axis of powers of two; `level` is a dashed horizontal one.

    `series` maps a name to its colour and its points.
    """
    points = [point for _, row in series.values() for point in row]
    most = max([y for _, y in points] + ([level[1]] if level else []))
    step = 10 ** math.floor(math.log10(most))
    while most / step < 4:
        step /= 2
    first, last = (math.log2(edge(x for x, _ in points)) for edge in (min, max))
    left, bottom = 70, TOP + CHART_HEIGHT
    room = WIDTH - left - 190

    def at(x: float, y: float) -> tuple[float, float]:
        share = (math.log2(x) - first) / ((last - first) or 1)
        return left + room * share, bottom - CHART_HEIGHT * y / (most * 1.05)

    body = []
    tick = 0.0
    while tick <= most * 1.05:
        _, y = at(2**first, tick)
        body.append(f'<path class="line-line" d="M{left} {y:.1f}h{room}"/>')
        body.append(label(left - 8, y + 4, f"{tick:,.0f}", "end"))
        tick += step
    for x in sorted({x for x, _ in points}):
        place, _ = at(x, 0)
        body.append(label(place, bottom + 18, f"{x:g}", "middle"))
    body.append(label(left + room / 2, bottom + 38, across, "middle"))
    ends: list[tuple[float, str]] = []
    if level:
        _, y = at(2**first, level[1])
        body.append(f'<path class="dashed line-floor" d="M{left} {y:.1f}h{room}"/>')
        ends.append((y, level[0]))
    for name, (colour, row) in series.items():
        places = [at(x, y) for x, y in row]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        body.append(f'<path class="curve line-{colour}" d="{path}"/>')
        body += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="fill-{colour}"/>' for x, y in places
        ]
        ends.append((places[-1][1], name))
    under = float("-inf")
    for y, name in sorted(ends):  # names that would lie on each other move down
        under = max(y, under + 16)
        body.append(label(left + room + 10, under + 4, name))
    told = "; ".join(
        f"{name}: " + ", ".join(f"{x:g} {rounded(y)}" for x, y in row)
        for name, (_, row) in series.items()
    )
    return frame(bottom + 50, title, told, body)
