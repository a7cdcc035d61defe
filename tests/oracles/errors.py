"""Errors with their wording."""

from typing import Any

import pytest


def refuses(match: str, error: type[Exception] = ValueError) -> Any:
    return pytest.raises(error, match=match)
