"""Pipeline parallelism: over which axis of the mesh the repeated layers are split, and in which order stages work."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from jax.sharding import Mesh

from torch_shard._common.caller import caller
from torch_shard._common.specs import describe_mesh
from torch_shard._common.validate import check_count, check_kind

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
        num_each = num // (self.num * self.repeats)
        order: list[int] = []
        for stage in range(self.num):
            for repeat in range(self.repeats):
                start = (repeat * self.num + stage) * num_each
                order += range(start, start + num_each)
        return order

    def places(self, num: int) -> dict[int, int]:
        """Where each of so many is stored, by its number."""
        return {number: place for place, number in enumerate(self.order(num))}

    def has(self, group: tuple[str, ...]) -> bool:
        """Tell whether these are names of the same entry of all layers."""
        if len(group) != len(self.layers):
            return False
        # Sorted with their dots, or `layers.1-a.weight` would stand before `layers.1.weight`.
        prefixes = sorted(f"{path}." for path in self.layers)
        return all(map(str.startswith, sorted(group), prefixes))
