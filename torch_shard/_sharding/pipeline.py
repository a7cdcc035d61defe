"""Pipeline parallelism: over which axis of the mesh the repeated layers are split, and in which order stages work."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from jax.sharding import Mesh

from torch_shard._common.caller import caller
from torch_shard._common.validate import check_count, check_kind
from torch_shard._sharding.mesh import describe_mesh

Schedule = Literal["1f1b", "gpipe"]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The axis of a mesh over which the repeated layers of a model are split, as a plan has it.

    Each device then has the parameters of its own stage's layers, and microbatches (`accumulate_steps=`) go from stage
    to stage. What comes before and after these layers (embeddings, head, loss) is computed by all stages together, each
    for a part of the rows.

    Args:
        axis: Of the mesh.
        repeats: How often a microbatch goes round: a stage has so many pieces of the layers, and waits less (circular;
            Narayanan et al., 2021, call it interleaved).
        schedule: `"1f1b"`: a stage computes the backward pass of a microbatch as soon as it can, and keeps what at most
            `2 * stages - 1` of them need for it (Narayanan et al., 2019). `"gpipe"`: first all forward passes, then all
            backward passes (Huang et al., 2019). None: `"1f1b"`, or `"gpipe"` with `repeats`.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: There is no such schedule, or not with `repeats`.

    Example:
        >>> import torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> ts.ShardingPlan({}, default=P(), pipeline=ts.Pipeline()).pipeline.schedule
        '1f1b'
    """

    axis: str = "stage"
    repeats: int = 1
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        check_kind("axis", self.axis, str)
        check_count("repeats", self.repeats)
        if self.schedule is None:
            object.__setattr__(self, "schedule", "1f1b" if self.repeats == 1 else "gpipe")
        if self.schedule not in get_args(Schedule):
            choices = ", ".join(f'"{choice}"' for choice in get_args(Schedule))
            raise ValueError(f"{caller()}: schedule must be one of {choices}, got {self.schedule!r}.")
        if self.schedule == "1f1b" and self.repeats > 1:
            raise ValueError(
                f'{caller()}: schedule="1f1b" is for repeats=1, got repeats={self.repeats}. Use schedule="gpipe".'
            )

    def find_faults(self, mesh: Mesh) -> list[str]:
        """Say what the mesh lacks.

        Args:
            mesh: Of the step.
        """
        if self.axis in mesh.shape:
            return []
        return [f'pipeline: the mesh {describe_mesh(mesh)} has no axis "{self.axis}".']


@dataclasses.dataclass(frozen=True)
class Stages:
    """The layers of a model over the stages of a mesh.

    Attributes:
        pipeline: What the plan says.
        num: Number of stages.
        layers: Paths of the layers, in order.
    """

    pipeline: Pipeline
    num: int
    layers: tuple[str, ...]

    @property
    def axis(self) -> str:
        """Of the mesh."""
        return self.pipeline.axis

    @property
    def repeats(self) -> int:
        """How often a microbatch goes round."""
        return self.pipeline.repeats

    def order(self, num: int) -> list[int]:
        """The numbers of so many layers, or iterations over some, as they are stored: by stage."""
        each = num // (self.num * self.repeats)
        starts = ((r * self.num + stage) * each for stage in range(self.num) for r in range(self.repeats))
        return [start + at for start in starts for at in range(each)]

    def places(self, num: int) -> dict[int, int]:
        """Where each of so many is stored, by its number."""
        return {number: place for place, number in enumerate(self.order(num))}

    def has(self, group: tuple[str, ...]) -> bool:
        """Tell whether these are names of the same entry of all layers."""
        return len(group) == len(self.layers) and all(
            # with their dots, or `layers.1-a.weight` would stand before `layers.1.weight`
            map(str.startswith, sorted(group), sorted(f"{path}." for path in self.layers))
        )


# Context parallelism: over which axis of the mesh the sequence is split, and how attention then finds all keys.


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
        wanted = (self.axis, *(axis for axis in self.rows if axis != "batch"))
        missing = [axis for axis in wanted if axis not in mesh.shape]
        return [f'context: the mesh {describe_mesh(mesh)} has no axis "{axis}".' for axis in missing]
