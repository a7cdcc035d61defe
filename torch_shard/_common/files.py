"""Files that are written whole or not at all."""

import contextlib
from collections.abc import Generator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path, None, None]:
    """Give a path to write to, which takes the place of `path` when all went well."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
