"""Types that many packages use, and that a checker cannot express more exactly."""

# PyTorch's class of operators, and some of its state, have no public names.
# pyright: reportPrivateUsage=false

from typing import Any, Protocol, TypeAlias

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
