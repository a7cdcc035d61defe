"""Types that many packages use, and that a checker cannot express more exactly; and a mapping of what was used last."""

# PyTorch's class of operators, and some of its state, have no public names.
# pyright: reportPrivateUsage=false

from typing import Any, Protocol, TypeAlias, TypeVar

import torch

PyTree: TypeAlias = Any
"""Arrays or tensors, or what is given for each of them, in containers that JAX's and PyTorch's pytrees know.

The one place where a value of any type is what is meant: a checker knows no recursive containers that users register.
"""


class Device(Protocol):
    """A device of JAX, whose own name for the class is a variable to a checker."""

    id: int
    platform: str
    process_index: int


Operator: TypeAlias = torch._ops.OpOverload
"""An ATen operator, or one of ours, as `torch.ops` has it."""


K = TypeVar("K")
V = TypeVar("V")

KEPT = 32
"""Programs that a step keeps, and captures of a model: enough for buckets of lengths, megabytes each."""


class LastUsed(dict[K, V]):
    """At most `KEPT` entries: beyond that, the one goes that was used longest ago. In order of their last use."""

    def use(self, key: K) -> V | None:
        """The value of a key, if it is there."""
        value = self.get(key)
        if value is not None:
            self.keep(key, value)
        return value

    def keep(self, key: K, value: V) -> None:
        """Put a value in, or in the place of another."""
        self.pop(key, None)
        self[key] = value
        if len(self) > KEPT:
            del self[next(iter(self))]
