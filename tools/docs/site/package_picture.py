"""The picture of the packages for the site: a Mermaid block as SVG, since Mermaid itself is a program that a page would have to load."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

BLOCK = re.compile(r"^```mermaid\nflowchart BT\n(.*?)^```$", re.DOTALL | re.MULTILINE)
WIDTH, HEIGHT, GAP_X, GAP_Y = 104, 34, 22, 46  # of a box, and between boxes, in units of the picture
COLUMNS = 5
STYLE = "fill:none;stroke:currentColor"


def draw_packages(markdown: str) -> str:
    """Replace a Mermaid flowchart from bottom to top by an SVG picture of it; other text stays."""
    return BLOCK.sub(lambda block: draw_flowchart(block[1]), markdown)


def draw_flowchart(text: str) -> str:
    """Return SVG for lines `a --> b` and `a["label"]`: an arrow leads upwards, to a row above all that leads to it."""
    labels = dict(re.findall(r'^ *(\w+)\["([^"]+)"\]', text, re.MULTILINE))
    arrows = re.findall(r"^ *(\w+) --> (\w+)", text, re.MULTILINE)
    names = dict.fromkeys([name for arrow in arrows for name in arrow])
    targets: dict[str, list[str]] = defaultdict(list)
    for start, end in arrows:
        targets[start].append(end)

    def find_row(name: str) -> int:
        return max((find_row(target) + 1 for target in targets[name]), default=0)

    places = place_boxes({name: find_row(name) for name in names}, arrows)
    whole = COLUMNS * (WIDTH + GAP_X) + WIDTH
    parts = [_arrow(places[start], places[end]) for start, end in arrows]
    parts += [_box(*places[name], labels.get(name, name)) for name in names]
    height = max(y for _, y in places.values()) + HEIGHT
    head = f'<svg viewBox="{-WIDTH} 0 {whole + WIDTH} {height:g}" role="img" aria-label="packages" style="max-width:44rem;width:100%">'
    marker = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    return f'{head}<defs>{marker}<path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>{"".join(parts)}</svg>\n'


def place_boxes(rows: Mapping[str, int], arrows: Sequence[tuple[str, str]]) -> dict[str, tuple[float, float]]:
    """Return the centre of each box: boxes are moved within their rows as long as that takes arrows off boxes or shortens them."""
    columns: dict[str, int] = {}
    for name, row in rows.items():
        columns[name] = sum(rows[other] == row for other in columns)

    def centre(name: str) -> tuple[float, float]:
        return columns[name] * (WIDTH + GAP_X) + WIDTH, rows[name] * (HEIGHT + GAP_Y) + HEIGHT

    def count_cost() -> float:
        cost = 0.0
        for start, end in arrows:
            (x, y), (u, v) = centre(start), centre(end)
            cost += abs(x - u) / WIDTH
            for name, row in rows.items():
                if rows[end] < row < rows[start]:
                    a, b = centre(name)
                    cost += 20 * (abs(x + (u - x) * (b - y) / (v - y) - a) < WIDTH / 2 + GAP_X / 2)
        return cost

    best, improved = count_cost(), True
    while improved:
        improved = False
        for name in rows:
            for column in range(COLUMNS):
                before = dict(columns)
                for other in rows:  # who is there changes places with it
                    if rows[other] == rows[name] and columns[other] == column:
                        columns[other] = columns[name]
                columns[name] = column
                if (cost := count_cost()) < best:
                    best, improved = cost, True
                else:
                    columns = before
    return {name: centre(name) for name in rows}


def _box(x: float, y: float, label: str) -> str:
    width = max(WIDTH, 8 * len(label))
    box = f'<rect x="{x - width / 2:g}" y="{y - HEIGHT / 2:g}" width="{width}" height="{HEIGHT}" rx="6" style="{STYLE}"/>'
    cover = box.replace(STYLE, "fill:var(--md-default-bg-color);stroke:currentColor")
    text = f'<text x="{x:g}" y="{y + 5:g}" text-anchor="middle" style="font-size:15px;fill:currentColor">{label}</text>'
    return cover + text


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    line = f'x1="{start[0]:g}" y1="{start[1] - HEIGHT / 2:g}" x2="{end[0]:g}" y2="{end[1] + HEIGHT / 2:g}"'
    return f'<line {line} style="{STYLE};opacity:0.6" marker-end="url(#tip)"/>'
