"""Pages that are made while the documentation is built: tutorials, operators, and the files beside the README."""

import re
from pathlib import Path
from typing import Any

import jupytext
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
BEFORE = "<!-- before -->"
COPIED = {
    "operators.md": "validation/operators/coverage.md",
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages; mkdocs calls this."""
    pages = {page: (ROOT / source).read_text() for page, source in COPIED.items()}
    pages["operators.md"] = re.sub(r"^\| (\w[\w.]*) \|", r"| `\1` |", pages["operators.md"], flags=re.MULTILINE)
    tutorials = {f"tutorials/{path.stem}.md": as_page(path) for path in sorted((ROOT / "tutorials").glob("*.py"))}
    for page, text in {**pages, **tutorials}.items():
        for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"):
            text = text.replace(f"]({name})", f"]({name.lower()})")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Show what the examples of a page begin with, where the page says so; mkdocs calls this."""
    code = "".join(f"    {line}" for line in (ROOT / "docs/before.py").read_text().splitlines(keepends=True))
    first = f'??? abstract "These examples begin with"\n\n    ```python\n{code}    ```'
    return markdown.replace(BEFORE, first)


def as_page(tutorial: Path) -> str:
    """Markdown of a tutorial: its text as it is, its code in fences."""
    cells = jupytext.read(tutorial, fmt="py:percent").cells
    return "\n\n".join(c.source if c.cell_type == "markdown" else f"```python\n{c.source}\n```" for c in cells)
