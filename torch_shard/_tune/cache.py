"""What candidates were found to take, kept in files: JSON alone, written whole or not at all, never executed."""

# PyTorch and JAX annotate some of their functions in part; what JSON holds is anything.
# pyright: reportUnknownMemberType=false

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from torch_shard._common.files import replacing
from torch_shard._common.types import PyTree

logger = logging.getLogger(__name__)

FORMAT = 2
VERSIONS = ("torch_shard", "torch", "jax", "jaxlib", "libtpu")


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the compiler says of a candidate.

    Attributes:
        memory: Bytes of one device at the peak.
        limit: Bytes that it may have; None if that is not known.
        compute: Seconds of a step without communication.
        exposed: Seconds in which a device waits for others.
        received: Bytes that it receives.
        cycles: By the compiler for TPUs.
        collectives: Number of each kind.
        took: Seconds of the compilation.
        refused: What kept it from being compiled; empty if nothing did.
        exposed_by_axis: Parts of `exposed`, where the compiler's schedule says them.
        flags: Options of the compiler that the step sets.
        loops: Whether layers run in loops.
        scaled: From how many layers of how many this is extrapolated; empty for a whole program.
    """

    memory: int = 0
    limit: int | None = None
    compute: float = 0.0
    exposed: float = 0.0
    received: int = 0
    cycles: int = 0
    collectives: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    took: float = 0.0
    refused: str = ""
    exposed_by_axis: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    loops: bool = False
    scaled: str = ""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.compute + self.exposed

    @property
    def fits(self) -> bool:
        """Whether it can run."""
        return not self.refused and (self.limit is None or self.memory <= self.limit)


def extrapolated(short: Measured, long: Measured, sizes: tuple[int, int], num: int) -> Measured:
    """What a whole program takes, by those of two with fewer layers: each layer more takes as much.

    Args:
        short: The one with the fewest.
        long: The other one.
        sizes: How many iterations of its loops each has.
        num: How many the whole has.
    """
    steps = (num - sizes[0]) / (sizes[1] - sizes[0])
    scaled = f"{sizes[0]} and {sizes[1]} of {num}"
    if short.refused or long.refused:
        return dataclasses.replace(short if short.refused else long, scaled=scaled)

    def grown(first: float, second: float) -> float:
        return max(first + steps * (second - first), 0.0)

    def by_key(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
        return {key: grown(first.get(key, 0), second.get(key, 0)) for key in dict.fromkeys([*first, *second])}

    counts = by_key(short.collectives, long.collectives)
    return dataclasses.replace(
        long,
        memory=int(grown(short.memory, long.memory)),
        compute=grown(short.compute, long.compute),
        exposed=grown(short.exposed, long.exposed),
        received=int(grown(short.received, long.received)),
        cycles=int(grown(short.cycles, long.cycles)),
        collectives={kind: round(number) for kind, number in counts.items()},
        exposed_by_axis=by_key(short.exposed_by_axis, long.exposed_by_axis),
        scaled=scaled,
    )


class Cache:
    """A directory of what is known, or none.

    Args:
        directory: Made if it is missing; None keeps nothing.
        about: What all of it depends on.
    """

    def __init__(self, directory: Path | None, about: Mapping[str, object]) -> None:
        self._directory, self._about = directory, dict(about)
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def read(self, what: object) -> Measured | None:
        """What is known of a candidate; None if that is nothing, or is damaged."""
        if (path := self._path(what)) is None or not path.is_file():
            return None
        try:
            found: Any = json.loads(path.read_text())
            if found["format"] != FORMAT or found["what"] != str(what):
                return None
            return checked(found["measured"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("tune: %s cannot be read (%s), and is made anew", path, error)
            return None

    def write(self, what: object, measured: Measured) -> None:
        """Keep what is known of a candidate."""
        if (path := self._path(what)) is not None:
            text = json.dumps({"format": FORMAT, "what": str(what), "measured": dataclasses.asdict(measured)}, indent=1)
            with replacing(path) as partial:
                partial.write_text(text)

    def _path(self, what: object) -> Path | None:
        if self._directory is None:
            return None
        return self._directory / f"{digest({**self._about, 'what': str(what)})}.json"


def checked(found: Any) -> Measured:
    """What a file says, if every field is of its kind.

    Raises:
        TypeError: Some are not, or are missing or unknown.
    """
    measured = Measured(**found)
    for field in dataclasses.fields(Measured):
        value, default = getattr(measured, field.name), getattr(_EXAMPLE, field.name)
        kinds = (int, float) if isinstance(default, float) else (type(default),)
        is_bool = isinstance(value, bool) != isinstance(default, bool)
        if is_bool or not (isinstance(value, kinds) or (value is None and field.name == "limit")):
            raise TypeError(f"{field.name} is {value!r}")
    return measured


_EXAMPLE = Measured(limit=0)


def digest(value: object) -> str:
    """A name for what a value says."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def versions() -> dict[str, str]:
    """Of what has to do with a compiled program."""
    found = dict[str, str]()
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe_entries(model: nn.Module) -> list[object]:
    """Names, shapes, dtypes, and which are trained."""
    entries = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in entries]


def describe_batch(batch: PyTree) -> object:
    """Structure, shapes and dtypes."""
    leaves, tree = jax.tree.flatten(batch, is_leaf=lambda leaf: isinstance(leaf, torch.Tensor))
    return str(tree), [(tuple(np.shape(leaf)), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves]
