"""What the directory of a checkpoint says: its step by its name, all else in a JSON file."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path

from jax.sharding import NamedSharding

from torch_shard._saved import SavedArray, flatten
from torch_shard._train.state import TrainState

HEAD = "state.json"
FORMAT = 1
_STEP = re.compile(r"step_(\d+)")


def step_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return directory / f"step_{step:08}"


def find_steps(directory: Path) -> list[int]:
    """The steps that have a checkpoint in a directory, in order."""
    names = {path.name for path in directory.glob("step_*")}
    found = sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)
    return [step for step in found if step_path(directory, step).name in names]


@dataclasses.dataclass(frozen=True)
class Head:
    """What a checkpoint says of itself, without its arrays.

    Attributes:
        step: Number of steps taken.
        num_batches: Number of batches seen.
        unsaved: Names of the buffers that are not in the module's `state_dict`.
        wide: Names of the entries that are int64 in torch, whatever they are here.
        metrics: Numbers that were kept with it.
        mesh: Sizes of the mesh axes that it was split over.
        stored: Its arrays.
    """

    step: int
    num_batches: int
    unsaved: tuple[str, ...]
    wide: tuple[str, ...]
    metrics: dict[str, float]
    mesh: dict[str, int]
    stored: list[SavedArray]


def head_of(state: TrainState, metrics: Mapping[str, float]) -> Head:
    """What the checkpoint of a state says of itself; it waits for the state."""
    sharding = state.step.sharding
    return Head(
        step=int(state.step),
        num_batches=int(state.num_batches),
        unsaved=state.unsaved,
        wide=state.wide,
        metrics={name: float(value) for name, value in metrics.items()},
        mesh=dict(sharding.mesh.shape) if isinstance(sharding, NamedSharding) else {},
        stored=list(flatten(state)),
    )


def write_head(directory: Path, head: Head) -> None:
    """The inverse of `read_head`."""
    found = {"format": FORMAT, **dataclasses.asdict(head)}
    (directory / HEAD).write_text(json.dumps(found), encoding="utf-8")


def read_head(directory: Path) -> Head:
    """Read what a checkpoint says of itself.

    Raises:
        ValueError: It was written by another version of torch_shard, or is no checkpoint.
    """
    try:
        found = json.loads((directory / HEAD).read_text(encoding="utf-8"))
        if found.pop("format") != FORMAT:
            raise KeyError("format")
        stored = [SavedArray.from_json(one) for one in found.pop("stored")]
        names = {key: tuple(found[key]) for key in ("unsaved", "wide")}
        return Head(**{**found, **names}, stored=stored)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{directory} is no checkpoint of this version of torch_shard: {error!r}.") from error
