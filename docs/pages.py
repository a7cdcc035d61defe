"""Parts of the pages of numbers: sections, tables, CSV files beside them, pictures for light and for dark pages."""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

THEMES = {
    "light": {"text": "#1f2328", "faint": "#6e7781", "edge": "#8c959f", "fill": ("#ddf4ff", "#fff1e5")},
    "dark": {"text": "#e6edf3", "faint": "#9198a1", "edge": "#6e7681", "fill": ("#12304d", "#46290f")},
}
BLUE, ORANGE = "#2f81f7", "#e8833a"  # read well on white and on black
Theme = Mapping[str, str]


def save_both(stem: Path, size: tuple[float, float], draw: Callable[[Figure, Theme], None]) -> None:
    """Write `STEM-light.svg` and `STEM-dark.svg`.

    Args:
        stem: Their path, without the theme and the suffix.
        size: Width and height in inches.
        draw: Draws on a figure, in the colors of a theme.
    """
    stem.parent.mkdir(exist_ok=True)
    for name, theme in THEMES.items():
        with mpl.rc_context({"svg.hashsalt": name, "font.size": 9}):
            figure = Figure(figsize=size, layout="constrained")
            draw(figure, theme)
            path = stem.with_name(f"{stem.name}-{name}.svg")
            figure.savefig(path, transparent=True, metadata={"Date": None})
            lines = path.read_text(encoding="utf-8").splitlines()
            path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")


def shown(name: str, says: str) -> str:
    """The Markdown that shows the picture of a theme on pages of that theme."""
    return "\n".join(f"![{says}](images/{name}-{theme}.svg#only-{theme})" for theme in THEMES)


def put(page: Path, section: str, text: str) -> None:
    """Write what stands between `<!-- SECTION -->` and `<!-- /SECTION -->` of a page.

    Args:
        page: A file of Markdown, which has both marks.
        section: Its name in the marks.
        text: Markdown.
    """
    begin, end = f"<!-- {section} -->", f"<!-- /{section} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{page} must have {begin} and {end}, between which this section stands")
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}", encoding="utf-8")


def section_of(page: Path, section: str) -> str:
    """What stands between the marks of a section."""
    found = re.search(rf"<!-- {section} -->\n(.*?)<!-- /{section} -->", page.read_text(encoding="utf-8"), re.DOTALL)
    return found[1].strip() if found else ""


def beside(page: Path, name: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write all rows as `tables/NAME.csv` beside a page, and give the Markdown that links to it.

    Args:
        page: The page.
        name: Of the table.
        head: Names of the columns.
        rows: Cells, which may have Markdown's backticks: these are left out.

    Returns:
        A link, with the number of rows.
    """
    path = page.parent / "tables" / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerows([[cell.replace("`", "").replace("\\", "") for cell in row] for row in (head, *rows)])
    return f"[All {len(rows)} rows as CSV](tables/{name}.csv)"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def plain(axes: Axes, theme: Theme) -> None:
    """Leave only what is read: two axes without a frame."""
    axes.set_facecolor("none")
    axes.tick_params(colors=theme["faint"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme["edge"])


def draw_bars(figure: Figure, theme: Theme, bars: Sequence[tuple[str, Sequence[float]]], labels: Sequence[str]) -> Axes:
    """Draw horizontal bars from the top down, each made of parts that follow one another.

    Args:
        figure: Where to draw.
        theme: Its colors.
        bars: The name of each bar and the lengths of its parts.
        labels: What each part is; empty, where there is only one.

    Returns:
        The axes, for their labels.
    """
    axes = figure.subplots()
    names, places = [name for name, _ in bars], range(len(bars), 0, -1)
    starts = [0.0] * len(bars)
    for part, color in zip(range(len(bars[0][1])), (BLUE, ORANGE), strict=False):
        lengths = [lengths[part] for _, lengths in bars]
        axes.barh(places, lengths, left=starts, color=color, height=0.7, label=labels[part] if labels else None)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    axes.set_yticks(places, names)
    plain(axes, theme)
    axes.tick_params(axis="y", colors=theme["text"], length=0)
    axes.margins(y=0.02)
    if labels:
        axes.legend(frameon=False, labelcolor=theme["text"])
    return axes
