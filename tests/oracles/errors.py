"""Errors with their wording."""

from typing import Any

import pytest


def refuses(match: str, error: type[Exception] = ValueError) -> Any:
    return pytest.raises(error, match=match)


def said(result: Any) -> str:
    """What a command's error box says, without its frame and line breaks."""
    return " ".join(result.stderr.replace("│", " ").split())
