"""Context parallelism: over which axis of the mesh the sequence is split, and how attention then finds all keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from jax.sharding import Mesh

from torch_shard._common.caller import caller
from torch_shard._common.specs import describe_mesh
from torch_shard._common.validate import check_kind

ContextMode = Literal["gather", "heads", "ring"]


@dataclass(frozen=True)
class Context:
    """The axis of a mesh over which the sequence of the batch is split, as a plan has it.

    Each device then has a part of the sequence of its rows, in all that has one. Attention needs all of it: its
    numbers are those of one device, however it gets them.

    Args:
        axis: Of the mesh.
        mode: `"gather"`: each device gathers all keys and values for its own queries. `"heads"`: it exchanges its part
            of all heads for the whole sequence of some, and back. `"ring"`: keys and values go round from device to
            device, and none ever has all of them.
        rows: The axes over which the rows of the batch are split; by default `batch`, if the mesh has it.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: There is no such mode, or the axis is one of the rows too.

    Example:
        >>> import torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> ts.ShardingPlan({}, default=P(), context=ts.Context("context")).context.mode
        'gather'
    """

    axis: str
    mode: ContextMode = "gather"
    rows: tuple[str, ...] = ("batch",)

    def __post_init__(self) -> None:
        check_kind("axis", self.axis, str)
        check_kind("rows", self.rows, tuple)
        if self.mode not in get_args(ContextMode):
            modes = ", ".join(f'"{mode}"' for mode in get_args(ContextMode))
            raise ValueError(f"{caller()}: mode of the context must be one of {modes}, got {self.mode!r}.")
        if self.axis in self.rows:
            raise ValueError(
                f'{caller()}: axis "{self.axis}" splits the rows of the batch, and cannot split its sequence too. Give '
                "the context an axis of its own."
            )

    def rows_on(self, mesh: Mesh) -> tuple[str, ...]:
        """Give the axes of the rows that a mesh has: it may lack `batch`.

        Args:
            mesh: Of the step.
        """
        return tuple(axis for axis in self.rows if axis in mesh.shape)

    def find_faults(self, mesh: Mesh) -> list[str]:
        """Say what the mesh lacks, a line for each axis.

        Args:
            mesh: Of the step.
        """
        lines: list[str] = []
        for axis in (self.axis, *self.rows):
            # `batch` is what rows are split over by default, and a mesh need not have it.
            if axis not in mesh.shape and (axis == self.axis or axis != "batch"):
                lines.append(f'context: the mesh {describe_mesh(mesh)} has no axis "{axis}".')
        return lines
