"""Plain English: phrases that a reader has to read twice, in docstrings, errors, comments and pages."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
HABITS = {
    r"\bof which not\b": "that not every ...",
    r"\bwill do\b": "works, is accepted",
    r"\bwill not do\b": "does not work, is not accepted",
    r"\bnobody need\b": "that may not be ...",
    r"\bwhat of\b": "say of what",
    r"\bfor ever\b": "forever",
    r"\blikewise\b": "too, the same way",
    r"\bwithout a word\b": "silently",
    r"\ba stranger\b": "an unknown client",
    r"(?<![Tt]here )\bis no (tensor|module|norm|state|file|number|plan|array|entry)\b": "is not a ...",
    r"\bspeaks as\b|\bwhose word\b": "say who raises it",
}
"""What to look for, and what an engineer would say."""


def test_pages_and_docstrings_are_plain_english() -> None:
    places = [path for name in ("torch_shard", "docs", "tutorials") for path in (ROOT / name).rglob("*")]
    places += [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r}: {instead}"
        for path in places
        if path.suffix in (".py", ".md")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for habit, instead in HABITS.items()
        if (match := re.search(habit, line))
    ]
    assert found == []
