"""Pictures without a plotting library: curves and maps as SVG, which is text that browsers draw.

A panel's curves are polylines named by ``data-name``. Its data-x and data-y say which numbers its
edges stand for, so that the numbers can be read back from the picture: see ``curves_of``.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from reference.types import Array

COLOURS = ("#1f6fb4", "#d1571b", "#2a8a3e", "#8a4fb0", "#b0892a", "#666666")
WIDTH, HEIGHT = 330, 220  # of a panel's frame, in pixels
LEFT, TOP, RIGHT, BOTTOM = 56, 34, 14, 46  # around it

Curve = tuple[Array, Array]  # x and y


class Panel(NamedTuple):
    """One frame with curves in it."""

    title: str
    across: str  # what x is
    up: str  # what y is
    x: tuple[float, float]  # from the left edge to the right
    y: tuple[float, float]
    curves: dict[str, Curve]
    log_y: bool = False


def figure(panels: Sequence[Panel]) -> str:
    """Return panels side by side, with a legend below for all."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    width = len(panels) * (LEFT + WIDTH + RIGHT)
    per_row = max(1, (width - LEFT) // 240)
    rows = -(-len(names) // per_row)
    body = [_panel(panel, i * (LEFT + WIDTH + RIGHT), names) for i, panel in enumerate(panels)]
    top = TOP + HEIGHT + BOTTOM
    for i, name in enumerate(names):
        x, y = LEFT + i % per_row * 240, top + 18 * (i // per_row) + 6
        body.append(f'<path d="M{x} {y}h22" stroke="{_colour(i)}" stroke-width="2.5"/>')
        body.append(text(x + 28, y + 4, name))
    return document(width, top + 18 * rows + 8, body)


def heat_map(values: Array, rows: Sequence[str], columns: Sequence[str], title: str) -> str:
    """Return a table of numbers in [0, 1] as squares, the darker the larger."""
    side, left, top = 22, 70, 100
    body = [text(left, 20, title, bold=True)]
    for j, name in enumerate(columns):
        x = left + side * j + 15
        body.append(text(x, top - 6, name, turn=f"rotate(-60 {x} {top - 6})"))
    for i, name in enumerate(rows):
        y = top + side * i
        body.append(text(left - 6, y + 15, name, anchor="end"))
        for j in range(len(columns)):
            body.append(
                f'<rect x="{left + side * j}" y="{y}" width="{side - 1}" height="{side - 1}" '
                f'fill="{COLOURS[0]}" fill-opacity="{values[i, j]:.3f}"/>'
            )
    return document(left + side * len(columns) + 30, top + side * len(rows) + 10, body)


def document(width: float, height: float, body: Sequence[str]) -> str:
    """Return a whole SVG file; the ground is white, so that it can be read on any page."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="sans-serif" font-size="12" '
        f'fill="none">\n'
        f'<clipPath id="frame"><rect width="{WIDTH}" height="{HEIGHT}"/></clipPath>\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def text(
    x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False, turn: str = ""
) -> str:
    """Return a line of text."""
    more = ' font-weight="bold"' if bold else ""
    more += f' transform="{turn}"' if turn else ""
    place = f'x="{x:g}" y="{y:g}" fill="#222222" text-anchor="{anchor}"{more}'
    return f"<text {place}>{escape(words)}</text>"


def curves_of(svg: str) -> list[dict[str, Curve]]:
    """Return the numbers that a figure draws, panel by panel: the inverse of ``figure``."""
    panels = []
    space = "{http://www.w3.org/2000/svg}"
    for g in ElementTree.fromstring(svg).iter(f"{space}g"):
        (x0, x1), (y0, y1) = (map(float, g.attrib[f"data-{axis}"].split()) for axis in "xy")
        curves = {}
        for line in g.iter(f"{space}polyline"):
            points = np.array([float(n) for n in re.split("[ ,]", line.attrib["points"])])
            across, down = points.reshape(-1, 2).T / np.array([[WIDTH], [HEIGHT]])
            y = y1 + down * (y0 - y1)
            y = 10**y if g.attrib["data-log"] == "True" else y
            curves[line.attrib["data-name"]] = (x0 + across * (x1 - x0), y)
        panels.append(curves)
    return panels


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers from low to high, at most ``most``."""
    rough = (high - low) / (most - 1)
    power = 10 ** np.floor(np.log10(rough))
    step = power * next(m for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = int(np.ceil(low / step - 1e-9))
    return [i * step for i in range(first, int(np.floor(high / step + 1e-9)) + 1)]


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _panel(panel: Panel, left: float, names: Sequence[str]) -> str:
    (x0, x1), (y0, y1) = panel.x, panel.y
    if panel.log_y:
        y0, y1 = np.log10(y0), np.log10(y1)
    out = [
        f'<g transform="translate({left + LEFT} {TOP})" data-x="{x0:g} {x1:g}" '
        f'data-y="{y0:g} {y1:g}" data-log={quoteattr(str(panel.log_y))}>',
        text(0, -12, panel.title, bold=True),
        text(WIDTH / 2, HEIGHT + 36, panel.across, anchor="middle"),
        text(-42, HEIGHT / 2, panel.up, anchor="middle", turn=f"rotate(-90 -42 {HEIGHT / 2:g})"),
    ]
    for x in ticks(x0, x1):
        at = (x - x0) / (x1 - x0) * WIDTH
        out.append(f'<path d="M{at:.1f} 0V{HEIGHT}" stroke="#e4e4e4"/>')
        out.append(text(at, HEIGHT + 16, f"{x:g}", anchor="middle"))
    for y in np.arange(np.ceil(y0), y1 + 0.01) if panel.log_y else ticks(y0, y1):
        at = (y1 - y) / (y1 - y0) * HEIGHT
        out.append(f'<path d="M0 {at:.1f}H{WIDTH}" stroke="#e4e4e4"/>')
        name = f"1e{y:g}" if panel.log_y else f"{y:g}"
        out.append(text(-6, at + 4, name, anchor="end"))
    out.append(f'<rect width="{WIDTH}" height="{HEIGHT}" stroke="#888888"/>')
    for name, (xs, ys) in panel.curves.items():
        ys = np.log10(ys) if panel.log_y else ys
        across, down = (xs - x0) / (x1 - x0) * WIDTH, (y1 - ys) / (y1 - y0) * HEIGHT
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True))
        out.append(
            f'<polyline data-name={quoteattr(name)} points="{points}" clip-path="url(#frame)" '
            f'stroke="{_colour(names.index(name))}" stroke-width="2"/>'
        )
    return "\n".join([*out, "</g>"])
