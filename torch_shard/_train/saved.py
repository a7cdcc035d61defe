"""Compiled steps in files: a program as JAX's own cache keeps it, with what it is for. Nothing is unpickled."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false

import collections
import contextlib
import dataclasses
import itertools
import json
import tempfile
import threading
import zipfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from torch_shard._common.caller import caller
from torch_shard._common.printed import replacing
from torch_shard._common.validate import check_file
from torch_shard._cost import partitioner_refusals
from torch_shard._hosts import is_shared
from torch_shard._train.facts import show_line
from torch_shard._train.programs import CompileCache

FACTS, ENTRY = "facts.json", "-cache"
"""The parts of a file: what it is for, and JAX's entry, whose name begins with its key."""

MOST = 8
"""Differences that an error names."""


@dataclasses.dataclass(frozen=True)
class SavedStep:
    """A compiled program as a file has it.

    Attributes:
        path: The file.
        facts: What it is for, by name.
        text: Its StableHLO.
        entry: The name of JAX's entry, and its bytes.
    """

    path: Path
    facts: Mapping[str, str]
    text: str
    entry: tuple[str, bytes]

    def check(self, facts: Mapping[str, object]) -> None:
        """Refuse it where it is for something else."""
        here, there = _as_text(facts), self.facts
        found = [f"{n} (file: {there.get(n)}, here: {fact})" for n, fact in here.items() if fact != there.get(n)]
        if found:
            raise self._refusal("; ".join([*found[:MOST], *(["and others"] * (len(found) > MOST))]))

    def take(self, lowered: jax.stages.Lowered, mesh: Mesh) -> None:
        """Let JAX have it in the place of a program that is to be compiled, which is refused if it is not the same."""
        own, text = self.text.splitlines(), lowered.as_text().splitlines()
        for number, (line, other) in enumerate(itertools.zip_longest(own, text, fillvalue="(it has ended)")):
            if line != other:
                shown = f"file: {line.strip()[:200]}, here: {show_line(text, number, lowered)}"
                raise self._refusal(
                    f"line {number + 1} of the program ({shown}), and so in the loss, the optimizer or remat"
                )
        with tempfile.TemporaryDirectory() as directory, _requests() as num:
            Path(directory, self.entry[0]).write_bytes(self.entry[1])
            with CompileCache(directory, mesh).active():
                lowered.compile()
        if num[ASKED] > num[FOUND]:
            raise self._refusal("what JAX or XLA is set to, or its program is damaged: this one had to be compiled")

    def _refusal(self, difference: str) -> ValueError:
        return ValueError(
            f"{caller()}: compiled={str(self.path)!r} must be of this very step, but differs in {difference}. Make and "
            "call the step as it was saved, or save this one: step.save_compiled(path, batch)."
        )


def _as_text(facts: Mapping[str, object]) -> dict[str, str]:
    return {name: fact.hex()[:8] if isinstance(fact, bytes) else str(fact) for name, fact in facts.items()}


ASKED, FOUND = (f"/jax/compilation_cache/{event}" for event in ("compile_requests_use_cache", "cache_hits"))


@contextlib.contextmanager
def _requests() -> Generator[collections.Counter[str], None, None]:
    """Count what this thread asks of JAX's cache, and what is found there."""
    num, own = collections.Counter[str](), threading.get_ident()

    def note(event: str, **_: str | int) -> None:
        num[event] += threading.get_ident() == own

    jax.monitoring.register_event_listener(note)
    try:
        yield num
    finally:
        jax.monitoring.unregister_event_listener(note)


def read_step(path: object) -> SavedStep:
    """What `write_step` has written."""
    file = check_file("compiled", path)
    try:
        with zipfile.ZipFile(file) as parts:
            if any(info.compress_type != zipfile.ZIP_STORED for info in parts.infolist()):
                raise ValueError("its parts are compressed")  # else none is longer than the file
            (name,) = (name for name in parts.namelist() if name.endswith(ENTRY))
            found = json.loads(parts.read(FACTS))
            return SavedStep(file, dict(found["facts"]), str(found["text"]), (Path(name).name, parts.read(name)))
    except Exception as error:  # of zipfile, of what is missing or of another kind
        raise ValueError(
            f"{caller()}: compiled={str(file)!r} must be a whole file of step.save_compiled, but it cannot be read "
            f"({type(error).__name__}: {error}). Save the step again, or copy the file again."
        ) from error


def entries_of(lowered: jax.stages.Lowered, mesh: Mesh) -> list[tuple[str, bytes]] | None:
    """Compile a program, and give what JAX's cache keeps of it. None where JAX has it already, and asks no cache."""
    with tempfile.TemporaryDirectory() as directory, _requests() as num:
        with CompileCache(directory, mesh).active(), partitioner_refusals(mesh):
            lowered.compile()
        found = [(path.name, path.read_bytes()) for path in Path(directory).iterdir()]
    return found if num[ASKED] else None


def write_step(
    file: Path, entries: Sequence[tuple[str, bytes]], text: str, facts: Mapping[str, object], mesh: Mesh
) -> None:
    """Write a compiled program to a file; of several processes the first one, which alone keeps entries."""
    if jax.process_index() and is_shared(mesh):
        return
    if len(entries) != 1:
        raise NotImplementedError(
            f"{caller()}: JAX must keep the program in its cache, but keeps none of several CPU devices (XLA:CPU loses "
            "the order of their collectives), none that calls Python (jax.pure_callback, jax.debug.print), and none in "
            "a process but the first. Save a step for other devices, or without callbacks."
        )
    with replacing(file) as partial, zipfile.ZipFile(partial, "w") as parts:
        parts.writestr(FACTS, json.dumps({"facts": _as_text(facts), "text": text}, indent=1))
        parts.writestr(*entries[0])
