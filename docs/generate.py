"""Pages that are made while the documentation is built: the front page, from the README, and the tutorials."""

import re
from pathlib import Path
from typing import Any

import jupytext
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BEFORE = "<!-- before -->"
PAGES = (
    "small_gpt",
    "distributed_arrays",
    "shard_map_and_collectives",
    "parallel_evaluation",
    "transparent_pmap",
)
"""Tutorials that are pages; all of them are files of the site, too."""
BOOST = {"guides/wrong.md": 8, "guides/": 4, "coming_from/": 2, "proof.md": 0.2, "tpu.md": 0.2}
"""By how much the search prefers pages, by what their paths begin with."""


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages; mkdocs calls this."""
    files.append(File.generated(config, "index.md", content=front_page((ROOT / "README.md").read_text())))
    for path in sorted((ROOT / "tutorials").glob("*.py")):
        files.append(File.generated(config, f"tutorials/{path.name}", content=path.read_text()))
        if path.stem in PAGES:
            files.append(File.generated(config, f"tutorials/{path.stem}.md", content=as_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Show what the examples of a page begin with, where the page says so; mkdocs calls this."""
    boosts = (boost for begin, boost in BOOST.items() if page.file.src_uri.startswith(begin))
    page.meta["search"] = {"boost": next(boosts, 1)}
    code = "".join(f"    {line}" for line in (ROOT / "docs/before.py").read_text().splitlines(keepends=True))
    first = (
        f'??? abstract "`model`, `batch`, `mesh`, `plan`: these examples begin with"\n\n    ```python\n{code}    ```'
    )
    shown = re.sub(rf"^{BEFORE}.*$", lambda _: first, markdown, flags=re.MULTILINE)  # a link, in the repository
    return _to_tutorials(shown, "../../tutorials/", "../tutorials/")


def front_page(readme: str) -> str:
    """The README without what is about the repository, with links of the site."""
    text = re.sub(r"<!-- repository -->.*?<!-- /repository -->\n", "", readme, flags=re.DOTALL)
    text = re.sub(
        r"<picture>.*?<img alt=\"(.*?)\" src=\"docs/(\S+)-light.svg\">.*?</picture>", _pictures, text, flags=re.DOTALL
    )
    return _to_tutorials(text.replace("](docs/", "]("), "tutorials/", "tutorials/")


def _to_tutorials(text: str, there: str, here: str) -> str:
    """Links to tutorials, which in the repository lead to files, as the site has them: to pages, or else to files.

    Args:
        text: Of a page.
        there: Where the tutorials are in the repository, seen from the page.
        here: Where they are on the site.
    """

    def link(found: re.Match[str]) -> str:
        return f"]({here}{found[1]}.{'md' if found[1] in PAGES else 'py'})"

    return re.sub(rf"\]\({re.escape(there)}(\w+)\.py\)", link, text)


def _pictures(found: re.Match[str]) -> str:
    return "\n".join(f"![{found[1]}]({found[2]}-{theme}.svg#only-{theme})" for theme in ("light", "dark"))


def as_page(tutorial: Path) -> str:
    """Markdown of a tutorial: its text as it is, its code in fences."""
    cells = jupytext.read(tutorial, fmt="py:percent").cells
    return "\n\n".join(c.source if c.cell_type == "markdown" else f"```python\n{c.source}\n```" for c in cells)
