"""Errors with their wording."""

import re
from collections.abc import Callable
from typing import Any

import pytest


def assert_refused(table: dict[str, str], call: Callable[[str], object]) -> None:
    """Each call of a table raises the class and the words beside it; all that do not are told of together."""
    faults = []
    for text, words in table.items():
        try:
            said = f"nothing: it gave {call(text)}"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        if not re.match(words, said, re.DOTALL):
            faults.append(f"{text}\n  must be {words}\n  is {said}")
    assert not faults, "\n".join(faults)


def refuses(match: str, error: type[Exception] = ValueError) -> Any:
    return pytest.raises(error, match=match)


def said(result: Any) -> str:
    """What a command's error box says, without its frame and line breaks."""
    return " ".join(result.stderr.replace("│", " ").split())
