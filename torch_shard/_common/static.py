"""Python values that programs are made for."""

from typing import Any

import jax


@jax.tree_util.register_static
class Static:
    """A hashable Python value that rides in a pytree; to be equal, types must be too (2, 2.0 and True are not)."""

    def __init__(self, value: Any) -> None:
        self.value, self._exact = value, _exact(value)

    def __hash__(self) -> int:
        return hash(self._exact)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._exact == other._exact


def _exact(value: Any) -> Any:
    """A key that is equal only for values that mean the same to a program."""
    if isinstance(value, tuple):
        return type(value), *map(_exact, value)
    return type(value), repr(value) if isinstance(value, float | complex) else value  # -0.0 is not 0.0, nan is nan
