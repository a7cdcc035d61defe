"""What candidates were found to take, kept in files: JSON alone, written whole or not at all, never executed."""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from torch_shard._common.printed import replacing
from torch_shard._entries import named_tensors

logger = logging.getLogger(__name__)

FORMAT = 3
VERSIONS = ("torch_shard", "torch", "jax", "jaxlib", "libtpu")
"""Of these a compiled program depends."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the compiler says of a candidate.

    Attributes:
        memory: Bytes of one device at the peak.
        compute: Seconds of a step without communication.
        exposed: Seconds in which a device waits for others.
        received: Bytes that it receives.
        cycles: By the compiler for TPUs.
        took: Seconds of the compilation.
        refused: What kept it from being compiled; empty if nothing did.
    """

    memory: int = 0
    compute: float = 0.0
    exposed: float = 0.0
    received: int = 0
    cycles: int = 0
    took: float = 0.0
    refused: str = ""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.compute + self.exposed


class Cache:
    """A directory of what is known, or none."""

    def __init__(self, directory: Path | None, about: Mapping[str, object]) -> None:
        versions = {own.name: own.version for own in importlib.metadata.distributions() if own.name in VERSIONS}
        self._directory, self._about = directory, [FORMAT, versions, about]
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def read(self, what: object) -> Measured | None:
        """What is known of a candidate; None if that is nothing, or is damaged."""
        if (path := self._path(what)) is None or not path.is_file():
            return None
        try:
            found: Any = json.loads(path.read_text())
            return Measured(**{name: type(default)(found[name]) for name, default in vars(Measured()).items()})
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("tune: %s cannot be read (%s), and is made anew", path, error)
            return None

    def write(self, what: object, measured: Measured) -> None:
        """Keep what is known of a candidate."""
        if (path := self._path(what)) is None:
            return
        try:
            with replacing(path) as partial:
                partial.write_text(json.dumps(dataclasses.asdict(measured), indent=1))
        except OSError as error:  # a full disk, say: the search goes on with what was found
            logger.warning("tune: %s cannot be written (%s), and would be compiled again", path, error)

    def _path(self, what: object) -> Path | None:
        if self._directory is None:
            return None
        return self._directory / f"{digest([*self._about, str(what)])}.json"


def digest(value: object) -> str:
    """A name for what a value says."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def describe_entries(model: nn.Module) -> list[object]:
    """Names, shapes, dtypes, and which are trained."""
    return [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in named_tensors(model).items()]
