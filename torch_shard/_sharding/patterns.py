"""Patterns of names: exact, globs over dotted segments, or regular expressions."""

import re
from collections.abc import Callable


def make_matcher(key: str | re.Pattern[str]) -> Callable[[str], object]:
    """Tell whether a name is what a rule says: an exact name, a glob or a regex."""
    if isinstance(key, re.Pattern):
        return key.fullmatch
    if "*" not in key:
        return key.__eq__
    # Every segment takes its closing dot along, so that `**` may stand for no segment at all.
    parts = (
        r"(?:[^.]*\.)*" if part == "**" else re.escape(part).replace(r"\*", "[^.]*") + r"\." for part in key.split(".")
    )
    whole = re.compile("".join(parts))
    return lambda name: whole.fullmatch(name + ".")
