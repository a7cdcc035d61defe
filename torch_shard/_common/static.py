"""Python values that programs are made for."""

from typing import Generic, TypeVar, cast

import jax

T = TypeVar("T")


@jax.tree_util.register_static
class Static(Generic[T]):
    """A hashable Python value that rides in a pytree; to be equal, types must be too (2, 2.0 and True are not)."""

    def __init__(self, value: T) -> None:
        self.value, self._exact = value, _exact(value)

    def __hash__(self) -> int:
        return hash(self._exact)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._exact == other._exact


def _exact(value: object) -> object:
    """A key that is equal only for values that mean the same to a program."""
    kind = type(value)
    if isinstance(value, tuple):
        return kind, *(_exact(item) for item in cast(tuple[object, ...], value))
    return kind, repr(value) if isinstance(value, float | complex) else value  # -0.0 is not 0.0, nan is nan
