"""What `print` and notebooks show of an object that `rich.print` shows as a table or a group."""

import io
import re
from collections.abc import Sequence

from rich.console import Console, RenderableType


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
