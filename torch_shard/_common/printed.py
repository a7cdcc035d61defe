"""What `print` shows of an object that `rich.print` shows as a table or a group."""

import io

from rich.console import Console, RenderableType


def printed(shown: RenderableType, width: int) -> str:
    """The text of it, without colors.

    Args:
        shown: A table, a group, or an object that rich can print.
        width: Of a line, in characters.
    """
    console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
    with console.capture() as text:
        console.print(shown)
    return text.get()
