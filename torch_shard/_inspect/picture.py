"""Grids of devices as an SVG."""

import re
from collections.abc import Iterable

from torch_shard._common.svg import MARGIN, Picture, width_of
from torch_shard._inspect.grid import Grid

# In pixels; y runs down the page.
LINE, CELL_HEIGHT, GAP, PADDING, SPACE = 20.0, 56.0, 4.0, 12.0, 40.0

MIN_CELL_WIDTH, MAX_WIDTH = 88.0, 1150.0  # panels stand side by side up to that width

MAX_LETTERS = 90  # of a line of names

HEADING, NAME, PLAIN, PART = 15.0, 13.0, 12.0, 11.0
"""Sizes of letters."""


def paint(heading: str, grids: Iterable[Grid]) -> str:
    """Paint grids as panels, side by side as far as they fit."""
    picture, x, y = Picture(), MARGIN, MARGIN
    if heading:
        picture.text(heading, x, y + LINE / 2, size=HEADING, style="text bold")
        y += 2 * LINE
    for grid in grids:
        lines = [line for names, kind in grid.lines for line in _wrap(names, kind)]
        kinds_at = max(width_of(name, NAME) for name, _ in lines) + PADDING * any(name for name, _ in lines)
        widest = max(max(width_of(cell.owner, PLAIN), width_of(cell.part, PART)) for row in grid.rows for cell in row)
        cell_width = max(MIN_CELL_WIDTH, widest + 2 * PADDING)
        above = max(width_of(grid.spec, PLAIN), *(kinds_at + width_of(kind, PLAIN) for _, kind in lines))
        width = max(above, cell_width * max(map(len, grid.rows)))
        if x > MARGIN and x + width > MAX_WIDTH:
            x, y = MARGIN, picture.height + SPACE
        below = _names(picture, x, y, [*lines, ("", grid.spec)] if grid.spec else lines, kinds_at)
        _cells(picture, x, below + GAP, grid, cell_width)
        x += width + SPACE
    return str(picture)


def _names(picture: Picture, x: float, y: float, lines: list[tuple[str, str]], kinds_at: float) -> float:
    """Write names with what they are, and the spec; give where the next line would be."""
    for name, kind in lines:
        picture.text(name, x, y + LINE / 2, size=NAME, style="text bold")
        picture.text(kind, x + (kinds_at if name else 0), y + LINE / 2, size=PLAIN, style="faint")
        y += LINE
    return y


def _cells(picture: Picture, x: float, y: float, grid: Grid, cell_width: float) -> None:
    for i, row in enumerate(grid.rows):
        for j, cell in enumerate(row):
            left, top = x + j * cell_width, y + i * CELL_HEIGHT
            picture.box(left, top, cell_width - GAP, CELL_HEIGHT - GAP, fill=cell.colour)
            middle = left + (cell_width - GAP) / 2
            picture.text(cell.owner, middle, top + 18, size=PLAIN, style="white bold", anchor="middle")
            picture.text(cell.part, middle, top + 35, size=PART, style="white", anchor="middle")


def _wrap(names: str, kind: str) -> list[tuple[str, str]]:
    """A line of names as several that are not too long, the kind beside the first."""
    lines = [""]
    for piece in re.findall(r".+?(?:[,=]|$)", names):
        if lines[-1] and len(lines[-1] + piece) > MAX_LETTERS:
            lines.append("")
        lines[-1] += piece
    return [(line, "" if i else kind) for i, line in enumerate(lines)]
