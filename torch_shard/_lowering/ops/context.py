"""Attention in a capture whose plan splits the sequence: queries stay as they are split, keys and values are gathered.

What attention takes and returns is marked here, in operators that PyTorch has itself; the attention operator
finds its keys in its own way, `attention_context`.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from jax.sharding import Mesh, PartitionSpec
from torch.fx import Node

from torch_shard._capture import current_mode
from torch_shard._common.caller import caller
from torch_shard._common.fx import args_of, shape_of
from torch_shard._lowering.constraints import RESULT, ROWS, Constraint, Placed, dim_of, lies
from torch_shard._lowering.ops.constrained import LAID, Laid
from torch_shard._lowering.rows import RowSplit
from torch_shard._sharding import Context

SPLIT, WHOLE = "split", "whole"
"""How the sequence lies: over the axis of the context, or whole on each device."""


class OverContext:
    """The context of a capture, and the mesh that its step runs on."""

    def __init__(self, context: Context, mesh: Mesh) -> None:
        self._context, self._mesh, self.mode = context, mesh, context.mode

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Attention that is captured within knows of it."""
        mode = current_mode()
        assert mode is not None
        before, mode.about = mode.about, self
        try:
            yield
        finally:
            mode.about = before

    def check_heads(self, num_heads: int, num_key_heads: int) -> None:
        """Refuse heads that cannot be exchanged for the sequence, if that is asked for."""
        if self._context.mode != "heads":
            return
        sizes = {axis: size for axis, size in self._mesh.shape.items() if axis not in self._context.rows}
        if any(num % math.prod(sizes.values()) for num in (num_heads, num_key_heads)):
            over = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
            raise ValueError(
                f'{caller()}: context_mode="heads" gives each device whole heads, and attention with {num_heads} heads '
                f"of queries and {num_key_heads} of keys does not divide over {over}. Use a smaller axis, or "
                'context_mode="gather", which needs no heads to divide.'
            )


def current_context() -> OverContext | None:
    """The context of the capture under way; None if its plan has none."""
    mode = current_mode()
    return mode.about if mode is not None and isinstance(mode.about, OverContext) else None


def gathered(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What attention takes: queries of a part of the sequence, keys and values of all."""
    if current_context() is None or min(query.ndim, key.ndim, value.ndim) < 3:
        return query, key, value
    q: Any = Laid.apply(query, LAID, (SPLIT,), (SPLIT,))
    k, v = (Laid.apply(x, LAID, (WHOLE,), (SPLIT,)) for x in (key, value))
    return q, k, v  # pyright: ignore[reportReturnType]


@lies(LAID)
def _over_context(node: Node, split: RowSplit) -> Placed:
    if split.context is None:
        return
    shape, (source, sequence) = shape_of(node), args_of(node)
    axes = split.places(dim_of(source, ROWS), len(shape) - 2 if sequence == SPLIT else None, shape)
    heads = len(shape) - 3
    if heads > 0 and shape[heads] % split.size_of(split.other_axes) == 0:
        axes[heads] = (*axes.get(heads, ()), *split.other_axes)
    spec = PartitionSpec(*(axes.get(dim) for dim in range(len(shape))))
    yield RESULT, Constraint(spec, f"attention over the context: its sequence is {sequence}", in_steps=True)
