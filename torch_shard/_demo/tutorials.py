"""The tutorials as files: where they are, what each is about, and as notebooks."""

import difflib
from pathlib import Path

from torch_shard._common.files import replacing

PACKAGE = Path(__file__).parent.parent

FOLDERS = (PACKAGE / "_tutorials", PACKAGE.parent / "tutorials")  # within a wheel; beside the package in a checkout


def find_tutorials() -> dict[str, Path]:
    """Every tutorial by name; none where the package came without them."""
    folder = next((folder for folder in FOLDERS if folder.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.py"))} if folder else {}


def get_tutorial(name: str) -> Path:
    """The tutorial of that name; `.py` may be at its end.

    Raises:
        ValueError: There is none; the error has the closest names, or all.
    """
    found = find_tutorials()
    name = name.removesuffix(".py")
    if name not in found:
        close = difflib.get_close_matches(name, found, n=3)
        hint = f"Did you mean {' or '.join(close)}?" if close else f"There are: {', '.join(found) or 'none'}."
        raise ValueError(f"there is no tutorial {name!r}. {hint}")
    return found[name]


def read_headline(path: Path) -> str:
    """The first line of a tutorial's text, which stands in comments: its heading."""
    lines = path.read_text(encoding="utf-8").splitlines()
    texts = (line.lstrip("# ").rstrip() for line in lines if line.startswith("# ") and not line.startswith("# %%"))
    return next(filter(None, texts), "")


def write_notebook(tutorial: Path, path: Path) -> None:
    """Write a tutorial as a notebook, whole or not at all.

    Args:
        tutorial: A script in the percent format.
        path: Of the notebook; must end in `.ipynb`.

    Raises:
        ValueError: Another suffix.
        ImportError: jupytext is not installed.
    """
    if path.suffix != ".ipynb":
        raise ValueError(f"a notebook ends in .ipynb, got {str(path)!r}.")
    try:
        import jupytext  # an extra
    except ImportError as error:
        raise ImportError("notebooks are made by jupytext, which is not installed: pip install jupytext.") from error
    notebook = jupytext.read(tutorial, fmt="py:percent")
    # Without a kernel, Jupyter would ask for one.
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    with replacing(path) as partial:
        partial.write_text(jupytext.writes(notebook, fmt="ipynb"), encoding="utf-8")
