"""Grids of devices as SVG or PNG."""

import dataclasses
import functools
import io
import re
from collections.abc import Iterable

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyBboxPatch
from matplotlib.textpath import text_to_path

from torch_shard._inspect.grid import Grid

# Lengths are in inches, and y runs down the page.
LINE, CELL_HEIGHT, GAP, PADDING = 0.2, 0.6, 0.05, 0.12

MARGIN, SPACE = 0.25, 0.4  # around the page, between panels

MIN_CELL_WIDTH, MAX_WIDTH = 0.9, 12.0  # panels stand side by side up to that width

MAX_LETTERS = 90  # of a line of names

DPI = 150


@dataclasses.dataclass(frozen=True)
class Style:
    """A style of text: its size in points, weight and colour."""

    size: float
    weight: str
    color: str

    def measure(self, text: str) -> float:
        """Width in inches, and a tenth more, as who views an SVG may lack the font."""
        font = FontProperties(size=self.size, weight=self.weight)
        return 1.1 * text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] / 72


HEADING, NAME = Style(12, "bold", "#1f2328"), Style(10, "bold", "#1f2328")

PLAIN, OWNER, PART = Style(9, "normal", "#59636e"), Style(9, "bold", "white"), Style(8, "normal", "white")


class Page:
    """A figure to be filled with text and boxes, as large as what is on it."""

    def __init__(self) -> None:
        # Not pyplot, which would look for a screen.
        self.figure = Figure(facecolor="white")
        self.axes = self.figure.add_axes((0.0, 0.0, 1.0, 1.0))
        self.axes.axis("off")
        self.width = self.height = 0.0

    def write(self, text: str, style: Style, x: float, y: float, *, centred: bool = False) -> None:
        """Set a line of text whose middle is at `y`."""
        self.axes.text(
            x, y, text, ha="center" if centred else "left", va="center", parse_math=False, **dataclasses.asdict(style)
        )
        self._reach(x + (0 if centred else style.measure(text)), y + LINE / 2)

    def fill(self, x: float, y: float, width: float, height: float, *, color: str) -> None:
        """Fill a box with rounded corners."""
        box = FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.05", facecolor=color, edgecolor="none"
        )
        self.axes.add_patch(box)
        self._reach(x + width, y + height)

    def _reach(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)

    def render(self, file_format: str) -> bytes:
        """The page as a file, the same each time; text in an SVG is text."""
        width, height = self.width + MARGIN, self.height + MARGIN
        self.figure.set_size_inches(width, height)
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        file, metadata = io.BytesIO(), {"Date": None} if file_format == "svg" else {}
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "torch_shard"}):
            self.figure.savefig(file, format=file_format, dpi=DPI, metadata=metadata)
        return file.getvalue()


class Panel:
    """One grid and what is said above it."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.names = [(line, kind) for names, kind in grid.lines for line, kind in _wrap(names, kind)]
        cells = [cell for row in grid.rows for cell in row]
        widest = max(max(OWNER.measure(cell.owner), PART.measure(cell.part)) for cell in cells)
        self.cell_width = max(MIN_CELL_WIDTH, widest + 2 * PADDING)

    @functools.cached_property
    def kind_x(self) -> float:
        """Horizontal place where shapes and dtypes begin."""
        return max(NAME.measure(name) for name, _ in self.names) + PADDING * any(name for name, _ in self.names)

    @property
    def width(self) -> float:
        """Width of the whole."""
        kinds = (self.kind_x + PLAIN.measure(kind) for _, kind in self.names)
        return max(*kinds, PLAIN.measure(self.grid.spec), self.cell_width * max(map(len, self.grid.rows)))

    def draw(self, page: Page, x: float, y: float) -> None:
        """Put it on a page, its upper left corner at `x`, `y`."""
        for name, kind in self.names:
            page.write(name, NAME, x, y + LINE / 2)
            page.write(kind, PLAIN, x + self.kind_x, y + LINE / 2)
            y += LINE
        if self.grid.spec:
            page.write(self.grid.spec, PLAIN, x, y + LINE / 2)
            y += LINE
        self._draw_cells(page, x, y + GAP)

    def _draw_cells(self, page: Page, x: float, y: float) -> None:
        for i, row in enumerate(self.grid.coloured_rows):
            for j, (cell, colour) in enumerate(row):
                left, top = x + j * self.cell_width, y + i * CELL_HEIGHT
                page.fill(left, top, self.cell_width - GAP, CELL_HEIGHT - GAP, color=colour)
                middle = left + (self.cell_width - GAP) / 2
                page.write(cell.owner, OWNER, middle, top + 0.19, centred=True)
                page.write(cell.part, PART, middle, top + 0.38, centred=True)


def paint(heading: str, grids: Iterable[Grid], file_format: str) -> bytes:
    """Paint grids as panels, side by side as far as they fit.

    Args:
        heading: Above all; may be empty.
        grids: In their order.
        file_format: `svg` or `png`.
    """
    page, x, y = Page(), MARGIN, MARGIN
    if heading:
        page.write(heading, HEADING, x, y + LINE / 2)
        y += 2 * LINE
    for panel in map(Panel, grids):
        if x > MARGIN and x + panel.width > MAX_WIDTH:
            x, y = MARGIN, page.height + SPACE
        panel.draw(page, x, y)
        x += panel.width + SPACE
    return page.render(file_format)


def _wrap(names: str, kind: str) -> list[tuple[str, str]]:
    """A line of names as several that are not too long, the kind beside the first."""
    lines = [""]
    for piece in re.findall(r".+?(?:[,=]|$)", names):
        if lines[-1] and len(lines[-1] + piece) > MAX_LETTERS:
            lines.append("")
        lines[-1] += piece
    return [(line, "" if i else kind) for i, line in enumerate(lines)]
