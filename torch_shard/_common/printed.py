"""What `print` and notebooks show of an object that rich shows as a table or a group, and pictures as SVG.

Pictures are readable on light and on dark pages: monospaced text, whose width is known without a font.
"""

import contextlib
import io
import os
import re
from collections.abc import Generator, Sequence
from html import escape
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, RenderableType

from torch_shard._common.caller import caller
from torch_shard._common.validate import check_file


def printed(shown: RenderableType, width: int) -> str:
    """The text of it, without colors."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
    with console.capture() as text:
        console.print(shown)
    return text.get()


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines of text, whose columns stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


def starred(path: str) -> str:
    """The path of a module, with a star for each number: the same for layers that are alike."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


class InNotebooks:
    """An object with `__rich__`, which notebooks show so, too."""

    def _repr_html_(self) -> str:
        console = Console(file=io.StringIO(), width=132, record=True, force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format=_HTML)


_HTML = '<pre style="line-height: normal; font-family: monospace">{code}</pre>'


MARGIN = 20.0
"""Around what is on a picture, in pixels as all lengths."""

_LETTER = 0.61
"""Width of a letter, of the size of its font: the widest of the usual ones."""

_LIGHT = {
    "back": "#ffffff",
    "text": "#1f2328",
    "faint": "#59636e",
    "line": "#d0d7de",
    "one": "#0969da",
    "two": "#bc4c00",
}
_DARK = {
    "back": "#0d1117",
    "text": "#e6edf3",
    "faint": "#9198a1",
    "line": "#3d444d",
    "one": "#4493f8",
    "two": "#f0883e",
}


def _rules(colours: dict[str, str]) -> str:
    """What is drawn in which colour; within the picture alone, as notebooks make it a part of their page."""
    return "".join(f".ts-picture .{name}{{fill:{colour};stroke:none}}" for name, colour in colours.items())


_STYLE = (
    ".ts-picture text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
    ".ts-picture .bold{font-weight:bold}"
    f"{_rules(_LIGHT)}@media(prefers-color-scheme:dark){{{_rules(_DARK)}}}"
)


def width_of(text: str, size: float) -> float:
    """Width of a line of text."""
    return cell_len(text) * size * _LETTER


class Picture:
    """Text and shapes on a page that is as large as what is on it; styles are the names of colours, and `bold`."""

    def __init__(self) -> None:
        self.width = self.height = 0.0
        self._parts = list[str]()

    def text(self, text: str, x: float, y: float, *, size: float, style: str, anchor: str = "start") -> None:
        """Write a line, if it is not empty, whose middle is at `y`."""
        if not text:
            return
        place = f'x="{x:g}" y="{y + 0.35 * size:g}" font-size="{size:g}" text-anchor="{anchor}"'
        self._parts.append(f'<text class="{style}" {place}>{escape(text)}</text>')
        reached = {"start": 1.0, "middle": 0.5, "end": 0.0}[anchor] * width_of(text, size)
        self._reach(x + reached, y + size / 2)

    def box(self, x: float, y: float, width: float, height: float, *, style: str) -> None:
        """Fill a box with rounded corners."""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{min(4, height / 2):g}"'
        self._parts.append(f'<rect class="{style}" {place}/>')
        self._reach(x + width, y + height)

    def _reach(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)

    def __str__(self) -> str:
        width, height = self.width + MARGIN, self.height + MARGIN
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="ts-picture" width="{width:g}" height="{height:g}"'
        back = f'<rect class="back" width="{width:g}" height="{height:g}" rx="8"/>'
        body = "\n".join([f"<style>{_STYLE}</style>", back, *self._parts])
        return f'{head} viewBox="0 0 {width:g} {height:g}">\n{body}\n</svg>\n'


def save_svg(picture: object, path: str | os.PathLike[str]) -> None:
    """Write a picture, whole or not at all.

    Args:
        picture: A `Picture`, or what it is as text.
        path: Of the file, which ends in `.svg`.
    """
    path = check_file("path", path)
    if path.suffix.lower() != ".svg":
        raise ValueError(
            f"{caller()}: pictures are SVG, so the suffix must be .svg, got {path.suffix!r} in {str(path)!r}. Browsers "
            "show and convert it."
        )
    with replacing(path) as partial:
        partial.write_text(str(picture), encoding="utf-8")


# Files that are written whole or not at all.


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path, None, None]:
    """Give a path to write to, which takes the place of `path` when all went well."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
