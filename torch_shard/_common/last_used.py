"""A mapping that keeps what was used last."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

KEPT = 32
"""Programs that a step keeps, and captures of a model: enough for buckets of lengths, megabytes each."""


class LastUsed(dict[K, V]):
    """At most `KEPT` entries: beyond that, the one goes that was used longest ago. In order of their last use."""

    _newest: V | None = None

    def use(self, key: K) -> V | None:
        """The value of a key, if it is there."""
        value = self.get(key)
        if value is not None and value is not self._newest:
            self.keep(key, value)
        return value

    def keep(self, key: K, value: V) -> None:
        """Put a value in, or in the place of another."""
        self.pop(key, None)
        self[key] = self._newest = value
        if len(self) > KEPT:
            del self[next(iter(self))]
